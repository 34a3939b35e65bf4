// SGD in one pass, with momentum, dampening, Nesterov's look ahead and weight decay.
//
// The arithmetic is that of `update` and `apply_updates` in fmp/optim, where torch's add is a fused multiply-add:
//
//   g = (gradient / scale) * clip
//   g = fma(decay, p, g)                             if the row says so
//   m = fma(momentum, m, g * gain)                   gain = 1 - dampening, but 1 the first time
//   d = g without momentum, else m, or fma(momentum, m, g) for Nesterov
//   p = p + d * -learning_rate
//
// The parameter p is in one of the forms of parameters.cuh, and float32 in between.
#include "chunks.cuh"
#include "factors.cuh"
#include "parameters.cuh"

struct sgd_row {
  const void* gradient;
  void* parameter;
  float* momentum;  // null without momentum
  void* low;        // what the form keeps beside the parameter; null for none
  long long size;
  u64 flags;
};

enum : u64 { DECAY = 1, NESTEROV = 2 };

struct alignas(16) sgd_coefficients {
  float negated_rate;
  float momentum;
  float gain;
  float decay;
};

template <class Gradient, int N>
struct sgd_inputs {
  pack<Gradient, N> gradient;
  pack<float, N> parameter, total;
};

template <class Gradient, class Form>
__device__ __forceinline__ void sgd(const sgd_row* rows, const u64* chunks, int chunk_size,
                                    const sgd_coefficients* coefficients, const float* scale, int divide,
                                    const float* clip, const u8* finite, const long long* seeds) {
  if (finite && !*finite) return;
  const chunk here = chunk_of_block(chunks, chunk_size);
  const sgd_row row = rows[here.row];
  const sgd_coefficients of_tensor = coefficients[here.row];
  const factor unscale = read_factor(scale, divide), shorten = read_factor(clip, false);
  const Gradient* gradient = (const Gradient*)row.gradient + here.first;
  const Form form(row.parameter, row.low, here, seeds);
  float* momentum = row.momentum ? row.momentum + here.first : nullptr;

  const auto read = [&](auto w, int i) {
    constexpr int W = decltype(w)::value;
    sgd_inputs<Gradient, W> x = {load<W>(gradient + i), form.read(w, i), {}};
    if (momentum) x.total = load<W>(momentum + i);
    return x;
  };
  const auto use = [&](auto w, int i, auto x) {
    constexpr int W = decltype(w)::value;
#pragma unroll
    for (int k = 0; k < W; k++) {
      float g = scaled(scaled(to_f32(x.gradient.v[k]), unscale), shorten);
      float &p = x.parameter.v[k], &m = x.total.v[k];
      if (row.flags & DECAY) g = fmaf(of_tensor.decay, p, g);
      float direction = g;
      if (momentum) {
        m = fmaf(of_tensor.momentum, m, g * of_tensor.gain);
        direction = row.flags & NESTEROV ? fmaf(of_tensor.momentum, m, g) : m;
      }
      p = p + direction * of_tensor.negated_rate;
    }
    form.write(w, i, x.parameter);
    if (momentum) store(momentum + i, x.total);
  };

  const int head = head_of<4>(gradient);
  const bool aligned = form.template fits<4>(head) && fits<4>(momentum, head);
  walk<4, 1>(count_of(here, chunk_size, row.size), head, aligned, read, use);
}

#define SGD(name, Gradient, Form) \
  extern "C" __global__ void __launch_bounds__(512) name( \
      const sgd_row* rows, const u64* chunks, int chunk_size, const sgd_coefficients* coefficients, \
      const float* scale, int divide, const float* clip, const u8* finite) { \
    sgd<Gradient, Form>(rows, chunks, chunk_size, coefficients, scale, divide, clip, finite, nullptr); \
  }
SGD(sgd_f32_f16, float, cast_form<f16_t>)
SGD(sgd_f32_bf16, float, cast_form<bf16_t>)
SGD(sgd_f16_f16, f16_t, cast_form<f16_t>)
SGD(sgd_bf16_bf16, bf16_t, cast_form<bf16_t>)
SGD(sgd_f32_remainder, float, remainder_form)
SGD(sgd_bf16_remainder, bf16_t, remainder_form)

// The seeds, one a row, lie on the device, so that a captured graph draws by those of its own step.
#define SGD_STOCHASTIC(name, Gradient, Parameter) \
  extern "C" __global__ void __launch_bounds__(512) name( \
      const sgd_row* rows, const u64* chunks, int chunk_size, const sgd_coefficients* coefficients, \
      const float* scale, int divide, const float* clip, const u8* finite, const long long* seeds) { \
    sgd<Gradient, stochastic_form<Parameter>>( \
        rows, chunks, chunk_size, coefficients, scale, divide, clip, finite, seeds); \
  }
SGD_STOCHASTIC(sgd_f32_stochastic_f16, float, f16_t)
SGD_STOCHASTIC(sgd_f32_stochastic_bf16, float, bf16_t)
SGD_STOCHASTIC(sgd_f16_stochastic_f16, f16_t, f16_t)
SGD_STOCHASTIC(sgd_bf16_stochastic_bf16, bf16_t, bf16_t)
