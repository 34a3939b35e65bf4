// CUDA's built-in functions on one thread: atomics, bits, rounding, 16-bit floats.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// Atomics are relaxed, as on the device.
template <class T>
inline T atomicExch(T* target, T value) {
  T old;
  __atomic_exchange(target, &value, &old, __ATOMIC_RELAXED);
  return old;
}

template <class T>
inline T atomicCAS(T* target, T expected, T value) {
  __atomic_compare_exchange(target, &expected, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

template <class T, class Change>
inline T executor_atomic(T* target, Change change) {
  T old, value;
  __atomic_load(target, &old, __ATOMIC_RELAXED);
  do {
    value = change(old);
  } while (!__atomic_compare_exchange(target, &old, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

template <class T>
inline T atomicAdd(T* target, T value) {
  return executor_atomic(target, [=](T old) { return (T)(old + value); });
}

template <class T>
inline T atomicOr(T* target, T value) {
  return executor_atomic(target, [=](T old) { return (T)(old | value); });
}

template <class T>
inline T atomicAnd(T* target, T value) {
  return executor_atomic(target, [=](T old) { return (T)(old & value); });
}

template <class T>
inline T atomicMax(T* target, T value) {
  return executor_atomic(target, [=](T old) { return old < value ? value : old; });
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Bits
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  shift &= 31;
  return shift ? high << shift | low >> (32 - shift) : high;
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = (uint64_t)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned choice = selector >> (4 * i) & 15;
    unsigned byte = (unsigned)(both >> (8 * (choice & 7)) & 255);
    if (choice & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; i++) result |= (x >> i & 1u) << (31 - i);
  return result;
}

// Arithmetic that is rounded once, to the nearest even number. Nothing else contracts: -ffp-contract=off.
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }

template <class T>
inline T __ldg(const T* pointer) {
  return *pointer;
}

template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}

template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

// binary16 <-> binary32, as cvt.f32.f16 and cvt.rn.f16.f32 do it: to the nearest even number, NaN to 0x7fff.
inline float executor_half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = (float)mantissa * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline uint16_t executor_float_to_half(float value) {
  const uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude >= 0x38800000u) {                                    // 2^-14 and more are normal
    return (uint16_t)(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
  }
  if (magnitude < 0x33000000u) return (uint16_t)sign;  // less than 2^-25 rounds to zero
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u, shift = 126 - (magnitude >> 23);
  const uint32_t quotient = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
  return (uint16_t)(sign | (quotient + (rest > half || (rest == half && (quotient & 1)))));
}
