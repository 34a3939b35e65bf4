// The sum of squares of all numbers that a launch has made, and whether one of them is not finite.
//
// Each block writes a partial result, and `finish` in scale.cu adds them up: without atomics nothing has to be zeroed
// before, and for the same addresses the order of the sum, hence its bits, is the same every time. (Which thread adds
// which number depends on where a tensor begins: on its head in chunks.cuh.)
#pragma once
#include "types.cuh"

struct alignas(8) partial {
  float sum;
  u32 nonfinite;
};

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// Adds up what the threads of a block have; the result is that of the first warp. The block must be whole warps.
template <class T>
__device__ __forceinline__ T block_sum(T value, bool flag, bool* any) {
  __shared__ T sums[32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  *any = __syncthreads_or(flag);
  if (threadIdx.x >= 32) return value;
  return warp_sum(threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : (T)0);
}

__device__ __forceinline__ void write_partial(partial* partials, float sum, bool nonfinite) {
  bool any;
  sum = block_sum(sum, nonfinite, &any);
  if (threadIdx.x == 0) partials[blockIdx.x] = partial{sum, any};
}
