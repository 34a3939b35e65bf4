// Adam and AdamW in one pass: reads gradients, parameters and moments once, and overwrites parameters and moments.
//
// The arithmetic is that of `update` and `apply_updates` in fmp/optim, operation by operation, where torch's add, lerp
// and addcmul round once for a product and a sum:
//
//   g = (gradient / scale) * clip
//   g = fma(coupled_decay, p, g)                                     if the row says so (Adam's L2 regularization)
//   m = fma(first_weight, g - m, m)                                  or fma(m - g, 1 - first_weight, g) from 0.5 on
//   v = fma(second_weight * g, g, v * second_kept)
//   u = m / (sqrt(v) + eps) * step_size
//   u = fma(shrink, p, u)                                            if the row says so (AdamW's decay)
//   p = p + u
//
// Learning rate and bias corrections are in the coefficients, a row for each tensor, for each has its own age. They are
// computed on the device by the same torch operations as for `update`: powers and logarithms differ in the last bit
// from one library to the next, what is here does not.
//
// The parameter p is in one of the forms of parameters.cuh, and float32 in between.
#include "chunks.cuh"
#include "factors.cuh"
#include "parameters.cuh"

struct adam_row {
  const void* gradient;
  void* parameter;
  float* first_moment;
  float* second_moment;
  void* low;  // what the form keeps beside the parameter; null for none
  long long size;
  u64 flags;
};

enum : u64 { COUPLED_DECAY = 1, DECOUPLED_DECAY = 2 };

struct alignas(16) adam_coefficients {
  float first_weight;   // 1 - b1
  float second_weight;  // 1 - b2
  float second_kept;    // 1 - second_weight
  float step_size;      // -learning_rate * sqrt(1 - b2**t) / (1 - b1**t)
  float eps;            // eps * sqrt(1 - b2**t)
  float shrink;         // -learning_rate * weight_decay
  float coupled_decay;
  float unused;
};

template <class Gradient, int N>
struct adam_inputs {
  pack<Gradient, N> gradient;
  pack<float, N> parameter, first, second;
};

// Interpolates from the nearer end, as torch does; with the weight 1 a zero keeps the sign of `to`.
__device__ __forceinline__ float lerp(float from, float to, float weight) {
  const float distance = to - from;
  return fabsf(weight) < 0.5f ? fmaf(weight, distance, from) : fmaf(-distance, 1.0f - weight, to);
}

template <class Gradient, class Form>
__device__ __forceinline__ void adam(const adam_row* rows, const u64* chunks, int chunk_size,
                                     const adam_coefficients* coefficients, const float* scale, int divide,
                                     const float* clip, const u8* finite, const long long* seeds) {
  if (finite && !*finite) return;
  const chunk here = chunk_of_block(chunks, chunk_size);
  const adam_row row = rows[here.row];
  const adam_coefficients of_tensor = coefficients[here.row];
  const factor unscale = read_factor(scale, divide), shorten = read_factor(clip, false);
  const Gradient* gradient = (const Gradient*)row.gradient + here.first;
  const Form form(row.parameter, row.low, here, seeds);
  float* first = row.first_moment + here.first;
  float* second = row.second_moment + here.first;

  const auto read = [&](auto w, int i) {
    constexpr int W = decltype(w)::value;
    return adam_inputs<Gradient, W>{load<W>(gradient + i), form.read(w, i), load<W>(first + i), load<W>(second + i)};
  };
  const auto use = [&](auto w, int i, auto x) {
    constexpr int W = decltype(w)::value;
#pragma unroll
    for (int k = 0; k < W; k++) {
      float g = scaled(scaled(to_f32(x.gradient.v[k]), unscale), shorten);
      float &p = x.parameter.v[k], &m = x.first.v[k], &v = x.second.v[k];
      if (row.flags & COUPLED_DECAY) g = fmaf(of_tensor.coupled_decay, p, g);
      m = lerp(m, g, of_tensor.first_weight);
      v = fmaf(of_tensor.second_weight * g, g, v * of_tensor.second_kept);
      float u = m / (sqrtf(v) + of_tensor.eps) * of_tensor.step_size;
      if (row.flags & DECOUPLED_DECAY) u = fmaf(of_tensor.shrink, p, u);
      p = p + u;
    }
    form.write(w, i, x.parameter);
    store(first + i, x.first);
    store(second + i, x.second);
  };

  const int head = head_of<4>(first);
  const bool aligned = fits<4>(gradient, head) && form.template fits<4>(head) && fits<4>(second, head);
  walk<4, 1>(count_of(here, chunk_size, row.size), head, aligned, read, use);
}

#define ADAM(name, Gradient, Form) \
  extern "C" __global__ void __launch_bounds__(512) name( \
      const adam_row* rows, const u64* chunks, int chunk_size, const adam_coefficients* coefficients, \
      const float* scale, int divide, const float* clip, const u8* finite) { \
    adam<Gradient, Form>(rows, chunks, chunk_size, coefficients, scale, divide, clip, finite, nullptr); \
  }
ADAM(adam_f32_f16, float, cast_form<f16_t>)
ADAM(adam_f32_bf16, float, cast_form<bf16_t>)
ADAM(adam_f16_f16, f16_t, cast_form<f16_t>)
ADAM(adam_bf16_bf16, bf16_t, cast_form<bf16_t>)
ADAM(adam_f32_remainder, float, remainder_form)
ADAM(adam_bf16_remainder, bf16_t, remainder_form)

// The seeds, one a row, lie on the device, so that a captured graph draws by those of its own step.
#define ADAM_STOCHASTIC(name, Gradient, Parameter) \
  extern "C" __global__ void __launch_bounds__(512) name( \
      const adam_row* rows, const u64* chunks, int chunk_size, const adam_coefficients* coefficients, \
      const float* scale, int divide, const float* clip, const u8* finite, const long long* seeds) { \
    adam<Gradient, stochastic_form<Parameter>>( \
        rows, chunks, chunk_size, coefficients, scale, divide, clip, finite, seeds); \
  }
ADAM_STOCHASTIC(adam_f32_stochastic_f16, float, f16_t)
ADAM_STOCHASTIC(adam_f32_stochastic_bf16, float, bf16_t)
ADAM_STOCHASTIC(adam_f16_stochastic_f16, f16_t, f16_t)
ADAM_STOCHASTIC(adam_bf16_stochastic_bf16, bf16_t, bf16_t)
