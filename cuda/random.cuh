// Random words that depend on nothing but a seed and the place of an element in its tensor, and rounding by them: the
// bits of `bits_at` in fmp/random.py and of `round_stochastically` in fmp/master/stochastic.py.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u32 mix(u32 word) {
  word ^= word >> 16;
  word *= 0x7feb352du;
  word ^= word >> 15;
  word *= 0x846ca68bu;
  return word ^ word >> 16;
}

__device__ __forceinline__ u32 random_word(long long seed, long long index) {
  constexpr u32 golden = 0x9e3779b9u;
  const u32 low = (u32)seed ^ (u32)(index >> 32) * golden;
  const u32 high = ((u32)(seed >> 32) + 1) * golden;
  return mix(mix((u32)index ^ high) ^ low);
}

// Rounds up in magnitude where the way from the number below to x, in steps of the format, is longer than
//
//   threshold = (2 * (word >> 9) + 1) / 2**24
//
// What the format has stays, inf and NaN too. Up to one step beyond its largest number comes out as the largest, from
// there on as inf.
template <class T>
__device__ __forceinline__ T round_by_chance(float x, u32 word);

// The way is a multiple of 2**-16, the lower half of the bits, subnormal numbers included. So it is longer than the
// threshold if that half is larger than the upper half of the word; then the sum carries.
template <>
__device__ __forceinline__ bf16_t round_by_chance<bf16_t>(float x, u32 word) {
  if (!is_finite(x)) return from_f32<bf16_t>(x);
  const u32 bits = __float_as_uint(x);
  const u32 rounded = ((bits & 0x7fffffffu) + (~word >> 16)) >> 16;
  return bf16_t{(u16)((bits >> 16 & 0x8000u) | min(rounded, 0x7f7fu))};
}

// A step is 2**-10 of the power of two below x, and that is at least 2**-14. Products with powers of two are exact, as
// is the difference.
template <>
__device__ __forceinline__ f16_t round_by_chance<f16_t>(float x, u32 word) {
  const float magnitude = fabsf(x);
  if (!(magnitude < 0x1p16f)) return from_f32<f16_t>(x);
  const u32 power = max(__float_as_uint(magnitude) & 0x7f800000u, 0x38800000u);
  const float inverse = __uint_as_float(0x7f000000u - power);
  const float threshold = (float)(word >> 9 << 1 | 1u) * 0x1p-24f;
  const float steps = magnitude * inverse * 0x1p10f, below = floorf(steps);
  const float rounded = (steps - below > threshold ? below + 1.0f : below) * 0x1p-10f * __uint_as_float(power);
  return from_f32<f16_t>(copysignf(fminf(rounded, 65504.0f), x));
}
