// Adds two lists of tensors, each times a number: how gradients of several batches or losses are accumulated.
//
//   z = a * x + b * y        (each product and the sum rounded once in float32; not contracted, as torch's three
//                             operations are not)
//
// It finds the norm of z and whether z is finite as scale.cu does, in the same form, for the same `finish`. z may be x
// or y.
//
// fmp launches those that write float32. axpby_f16_f16_f16 and axpby_bf16_bf16_bf16 are there because
// multi_tensor_axpby of NVIDIA Apex can do that too.
#include "chunks.cuh"
#include "reduce.cuh"

struct axpby_row {
  const void* x;
  const void* y;
  void* z;
  long long size;
};

template <class X, class Y, int N>
struct operands {
  pack<X, N> x;
  pack<Y, N> y;
};

template <class X, class Y, class Z>
__device__ __forceinline__ void axpby(const axpby_row* rows, const u64* chunks, int chunk_size, const float* a,
                                      const float* b, partial* partials) {
  const chunk here = chunk_of_block(chunks, chunk_size);
  const axpby_row row = rows[here.row];
  const X* x = (const X*)row.x + here.first;
  const Y* y = (const Y*)row.y + here.first;
  Z* z = (Z*)row.z + here.first;
  const int count = count_of(here, chunk_size, row.size);
  const float of_x = *a, of_y = *b;
  float sum = 0.0f;
  bool nonfinite = false;

  const auto read = [&](auto w, int i) {
    constexpr int W = decltype(w)::value;
    return operands<X, Y, W>{load<W>(x + i), load<W>(y + i)};
  };
  const auto use = [&](auto w, int i, auto of) {
    constexpr int W = decltype(w)::value;
    pack<Z, W> total;
#pragma unroll
    for (int k = 0; k < W; k++) {
      total.v[k] = from_f32<Z>(__fadd_rn(__fmul_rn(of_x, to_f32(of.x.v[k])), __fmul_rn(of_y, to_f32(of.y.v[k]))));
      const float result = to_f32(total.v[k]);
      sum = fmaf(result, result, sum);
      nonfinite |= !is_finite(result);
    }
    store(z + i, total);
  };

  constexpr int N = 16 / (sizeof(X) + sizeof(Y) + sizeof(Z) == 6 ? 2 : 4);
  const int head = head_of<N>(x);
  walk<N, 2>(count, head, fits<N>(y, head) && fits<N>(z, head), read, use);
  write_partial(partials, sum, nonfinite);
}

#define AXPBY(name, X, Y, Z) \
  extern "C" __global__ void __launch_bounds__(512) name(const axpby_row* rows, const u64* chunks, int chunk_size, \
                                                         const float* a, const float* b, partial* partials) { \
    axpby<X, Y, Z>(rows, chunks, chunk_size, a, b, partials); \
  }
AXPBY(axpby_f32_f32_f32, float, float, float)
AXPBY(axpby_f16_f32_f32, f16_t, float, float)
AXPBY(axpby_bf16_f32_f32, bf16_t, float, float)
AXPBY(axpby_f16_f16_f16, f16_t, f16_t, f16_t)
AXPBY(axpby_bf16_bf16_bf16, bf16_t, bf16_t, bf16_t)
