// How an optimizer finds a parameter and leaves it. A form is a template argument of the optimizers, and has
//
//   a constructor          from the two addresses in a row, the chunk, and the seeds of all rows
//   fits<N>(head)          whether packs may begin there in all of its streams
//   read(width, i)         the parameter in float32
//   write(width, i, p)     stores it
#pragma once
#include "chunks.cuh"
#include "random.cuh"

// A float32 master, and the cast of it that the model computes with. Where the parameter itself is float32 there is no
// cast, and `low` is null.
template <class Low>
struct cast_form {
  float* master;
  Low* low;

  __device__ __forceinline__ cast_form(void* parameter, void* low_, chunk here, const long long*)
      : master((float*)parameter + here.first), low(low_ ? (Low*)low_ + here.first : nullptr) {}

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

// A bfloat16 parameter and the 16 bits that it lacks: exact float32 numbers in 4 bytes, see fmp/master/remainder.py.
//
//   bits = (parameter << 16) + rest         the rest is an int16, in the place of `low`
//   parameter = (bits + 0x8000) >> 16       half up in magnitude, so that the rest is the lower half of the bits
struct remainder_form {
  bf16_t* parameter;
  short* rest;

  __device__ __forceinline__ remainder_form(void* parameter_, void* low, chunk here, const long long*)
      : parameter((bf16_t*)parameter_ + here.first), rest((short*)low + here.first) {}

  template <int N>
  __device__ __forceinline__ bool fits(int head) const {
    return ::fits<N>(parameter, head) && ::fits<N>(rest, head);
  }

  template <class Width>
  __device__ __forceinline__ pack<float, Width::value> read(Width, int i) const {
    const auto high = load<Width::value>(parameter + i);
    const auto low = load<Width::value>(rest + i);
    pack<float, Width::value> full;
#pragma unroll
    for (int k = 0; k < Width::value; k++) {
      full.v[k] = __uint_as_float(((u32)high.v[k].bits << 16) + (u32)low.v[k]);
    }
    return full;
  }

  template <class Width>
  __device__ __forceinline__ void write(Width, int i, pack<float, Width::value> full) const {
    pack<bf16_t, Width::value> high;
    pack<short, Width::value> low;
#pragma unroll
    for (int k = 0; k < Width::value; k++) {
      // The payload of a NaN may round to inf, or run over into the sign.
      const u32 bits = full.v[k] == full.v[k] ? __float_as_uint(full.v[k]) : 0x7fc00000u;
      high.v[k] = bf16_t{(u16)((bits + 0x8000u) >> 16)};
      low.v[k] = (short)bits;
    }
    store(parameter + i, high);
    store(rest + i, low);
  }
};

// A parameter of 16 bits and nothing beside it, rounded up or down by chance, see fmp/master/stochastic.py. Each row
// has a seed of its own, and each element draws by its place in the tensor.
template <class Parameter>
struct stochastic_form {
  Parameter* parameter;
  long long first, seed;

  __device__ __forceinline__ stochastic_form(void* parameter_, void*, chunk here, const long long* seeds)
      : parameter((Parameter*)parameter_ + here.first), first(here.first), seed(seeds[here.row]) {}

  template <int N>
  __device__ __forceinline__ bool fits(int head) const {
    return ::fits<N>(parameter, head);
  }

  template <class Width>
  __device__ __forceinline__ pack<float, Width::value> read(Width, int i) const {
    const auto narrow = load<Width::value>(parameter + i);
    pack<float, Width::value> full;
#pragma unroll
    for (int k = 0; k < Width::value; k++) full.v[k] = to_f32(narrow.v[k]);
    return full;
  }

  template <class Width>
  __device__ __forceinline__ void write(Width, int i, pack<float, Width::value> full) const {
    pack<Parameter, Width::value> narrow;
#pragma unroll
    for (int k = 0; k < Width::value; k++) {
      narrow.v[k] = round_by_chance<Parameter>(full.v[k], random_word(seed, first + i + k));
    }
    store(parameter + i, narrow);
  }
};
