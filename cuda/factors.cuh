// What a tensor is multiplied by, or divided by. The numbers lie on the device, so that a captured graph reads those of
// its own step; a null pointer stands for 1, which changes no bit.
#pragma once
#include "types.cuh"

struct factor {
  float by;
  bool divide;
};

// A division by a power of two, as most loss scales are, is the product with its inverse, bit for bit, and ten times
// cheaper. So is one by zero or infinity, whose mantissa is zero too.
__device__ __forceinline__ factor read_factor(const float* number, int divide) {
  const float by = number ? *number : 1.0f;
  const bool is_power = (__float_as_uint(by) & 0x7fffffu) == 0;
  if (divide && is_power) return factor{1.0f / by, false};
  return factor{by, divide != 0};
}

__device__ __forceinline__ float scaled(float x, factor f) { return f.divide ? x / f.by : x * f.by; }
