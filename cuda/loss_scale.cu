// The next loss scale, by the rule of `fmp.DynamicLossScale.adjust`, without asking the host whether the step was good:
//
//   not finite                       ->  max(scale * backoff_factor, min_scale), count 0
//   finite, the interval is full     ->  min(scale * growth_factor, max_scale), count 0
//   finite otherwise                 ->  the same scale, count + 1
//
// One thread. The new numbers may overwrite the old ones.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(32)
    adjust(const u8* finite, const float* scale, const int* growth_count, float* new_scale, int* new_growth_count,
           float growth_factor, float backoff_factor, int growth_interval, float min_scale, float max_scale) {
  if (threadIdx.x != 0) return;
  const int count = *finite ? (int)((u32)*growth_count + 1u) : 0;  // wraps, as torch's int32 does
  const bool grow = count >= growth_interval;
  const float old = *scale, grown = old * growth_factor, shrunk = old * backoff_factor;
  float next = old;
  if (!*finite) next = shrunk < min_scale ? min_scale : shrunk;
  if (*finite && grow) next = grown > max_scale ? max_scale : grown;
  *new_scale = next;
  *new_growth_count = grow ? 0 : count;
}
