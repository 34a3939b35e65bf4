// Multiplies many tensors by a number, or divides them by it, in one pass that also finds their norm and whether all
// results are finite. With no output it only measures, which reads two bytes for each 16-bit gradient and writes none.
//
//   y = x / number   or   x * number      (one rounding in float32, one more if y is stored in 16 bits)
//   norm = sqrt(sum of y**2),  finite = all y are finite
//
// Both describe y as it is stored: a product that overflows counts, whatever x was. In place, or into other memory.
//
// The sum is taken in float32 by each thread, over chunk size / threads squares, and by a tree in the block: at 65,536
// and 512 that is at most 140 roundings, a relative error below 1e-5. Over the blocks, of which a large model has
// thousands, it is taken in float64: a float32 sum would drift, and the numbers are few enough to cost nothing.
//
// fmp launches those that write float32. scale_f16_f16 and scale_bf16_bf16 are there because multi_tensor_scale of
// NVIDIA Apex can do that too.
#include "chunks.cuh"
#include "factors.cuh"
#include "reduce.cuh"

struct scale_row {
  const void* in;
  void* out;  // null to measure only
  long long size;
};

template <class In, class Out>
__device__ __forceinline__ void scale(const scale_row* rows, const u64* chunks, int chunk_size, const float* number,
                                      int divide, partial* partials) {
  const chunk here = chunk_of_block(chunks, chunk_size);
  const scale_row row = rows[here.row];
  const In* in = (const In*)row.in + here.first;
  Out* out = row.out ? (Out*)row.out + here.first : nullptr;
  const int count = count_of(here, chunk_size, row.size);
  const factor by = read_factor(number, divide);
  float sum = 0.0f;
  bool nonfinite = false;

  const auto read = [&](auto w, int i) { return load<decltype(w)::value>(in + i); };
  const auto use = [&](auto w, int i, auto x) {
    constexpr int W = decltype(w)::value;
    pack<Out, W> y;
#pragma unroll
    for (int k = 0; k < W; k++) {
      y.v[k] = from_f32<Out>(scaled(to_f32(x.v[k]), by));
      const float result = to_f32(y.v[k]);
      sum = fmaf(result, result, sum);
      nonfinite |= !is_finite(result);
    }
    if (out) store(out + i, y);
  };

  // Sixteen bytes of the wider format: each access of a warp then covers one stretch of memory.
  constexpr int N = 16 / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));
  const int head = head_of<N>(in);
  walk<N, 4>(count, head, fits<N>(out, head), read, use);
  write_partial(partials, sum, nonfinite);
}

#define SCALE(name, In, Out) \
  extern "C" __global__ void __launch_bounds__(512) name(const scale_row* rows, const u64* chunks, int chunk_size, \
                                                         const float* number, int divide, partial* partials) { \
    scale<In, Out>(rows, chunks, chunk_size, number, divide, partials); \
  }
SCALE(scale_f32_f32, float, float)
SCALE(scale_f16_f32, f16_t, float)
SCALE(scale_bf16_f32, bf16_t, float)
SCALE(scale_f16_f16, f16_t, f16_t)
SCALE(scale_bf16_bf16, bf16_t, bf16_t)

// One block. What the blocks of one launch, or of several with their partial results in one array, have found.
extern "C" __global__ void __launch_bounds__(1024) finish(const partial* partials, long long count, float* norm,
                                                          u8* finite) {
  double sum = 0.0;
  bool nonfinite = false;
  for (long long i = threadIdx.x; i < count; i += blockDim.x) {
    const partial found = partials[i];
    sum += (double)found.sum;
    nonfinite |= found.nonfinite != 0;
  }
  bool any;
  sum = block_sum(sum, nonfinite, &any);
  if (threadIdx.x != 0) return;
  *norm = (float)sqrt(sum);
  *finite = !any;
}
