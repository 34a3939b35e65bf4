// Number formats as they are stored, and how they become float and back. No header of the CUDA toolkit is needed, so
// the same text compiles with NVRTC alone, and for the CPU in the tests.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct f16_t {
  u16 bits;
};
struct bf16_t {
  u16 bits;
};

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(bf16_t x) { return __uint_as_float((u32)x.bits << 16); }
#ifdef __CUDA_ARCH__
__device__ __forceinline__ float to_f32(f16_t x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
#else
__device__ __forceinline__ float to_f32(f16_t x) { return executor_half_to_float(x.bits); }
#endif

// Rounds to the nearest number, and to an even one between two. What overflows becomes infinite. NaN stays NaN, but not
// with the same bits as on a CPU: there its sign may survive.
template <class T>
__device__ __forceinline__ T from_f32(float x);

template <>
__device__ __forceinline__ float from_f32<float>(float x) {
  return x;
}

template <>
__device__ __forceinline__ bf16_t from_f32<bf16_t>(float x) {
  const u32 bits = __float_as_uint(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return bf16_t{is_nan ? (u16)0x7fff : (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
__device__ __forceinline__ f16_t from_f32<f16_t>(float x) {
#ifdef __CUDA_ARCH__
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return f16_t{bits};
#else
  return f16_t{executor_float_to_half(x)};
#endif
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
