// How an optimizer finds a parameter and leaves it. A form is a template argument of the optimizers, and has
//
//   fits<N>(head)          whether packs may begin there in all of its streams
//   read(width, i)         the parameter in float32
//   write(width, i, p)     stores it
#pragma once
#include "chunks.cuh"

// A float32 master, and the cast of it that the model computes with. Where the parameter itself is float32 there is no
// cast, and `low` is null.
template <class Low>
struct cast_form {
  float* master;
  Low* low;

  __device__ __forceinline__ cast_form(void* master_, void* low_, long long first)
      : master((float*)master_ + first), low(low_ ? (Low*)low_ + first : nullptr) {}

  template <int N>
  __device__ __forceinline__ bool fits(int head) const {
    return ::fits<N>(master, head) && ::fits<N>(low, head);
  }

  template <class Width>
  __device__ __forceinline__ pack<float, Width::value> read(Width, int i) const {
    return load<Width::value>(master + i);
  }

  template <class Width>
  __device__ __forceinline__ void write(Width, int i, pack<float, Width::value> parameter) const {
    store(master + i, parameter);
    if (!low) return;
    pack<Low, Width::value> cast;
#pragma unroll
    for (int k = 0; k < Width::value; k++) cast.v[k] = from_f32<Low>(parameter.v[k]);
    store(low + i, cast);
  }
};
