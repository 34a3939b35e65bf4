// What CUDA C needs in order to compile with a C++ compiler: qualifiers, indices, barriers and warp collectives.
// Included before the unmodified text of a .cu file; scheduler.cpp runs what comes out.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __constant__ static const
// Blocks run one after another on one thread, so a static array serves as shared memory. It lies in .bss, which the
// scheduler fills with garbage before each block.
#define __shared__ static

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
};

namespace executor {

enum class Reduction { none, count, all, any };

// All of these are compiled without instrumentation: the checker sees what the kernel does, not what we do.
uint3 thread_index();
uint3 block_index();
dim3 block_size();
dim3 grid_size();
unsigned lane();
unsigned char* dynamic_shared_memory();
int barrier(int line, Reduction reduction = Reduction::none, int value = 0);
// A warp collective: every lane of `mask` gives a value and gets those of all 32 lanes.
void exchange(int line, unsigned mask, uint64_t value, uint64_t (&values)[32]);
void warp_barrier(int line, unsigned mask = 0xffffffffu);
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

template <class T>
inline uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8, "a lane gives at most eight bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
inline T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// `source` may lie outside the segment of `width` lanes: then a lane keeps its own value.
template <class T>
inline T shuffle(int line, unsigned mask, T value, int source, bool inside) {
  uint64_t values[32];
  exchange(line, mask, to_bits(value), values);
  if (!inside) return value;
  if (!(mask >> source & 1)) fail("shuffle at line %d reads lane %d, which is not in mask %08x", line, source, mask);
  return from_bits<T>(values[source]);
}

template <class T>
inline T shuffle_index(int line, unsigned mask, T value, int source, int width = 32) {
  return shuffle(line, mask, value, ((int)lane() & ~(width - 1)) | (source & (width - 1)), true);
}

template <class T>
inline T shuffle_up(int line, unsigned mask, T value, unsigned distance, int width = 32) {
  const int own = (int)lane(), inside = own & (width - 1);
  return shuffle(line, mask, value, own - (int)distance, inside >= (int)distance);
}

template <class T>
inline T shuffle_down(int line, unsigned mask, T value, unsigned distance, int width = 32) {
  const int own = (int)lane(), inside = own & (width - 1);
  return shuffle(line, mask, value, own + (int)distance, inside + (int)distance < width);
}

template <class T>
inline T shuffle_xor(int line, unsigned mask, T value, int bits, int width = 32) {
  const int own = (int)lane();
  return shuffle(line, mask, value, own ^ bits, ((own ^ bits) & ~(width - 1)) <= (own & ~(width - 1)));
}

inline unsigned ballot(int line, unsigned mask, bool vote) {
  uint64_t values[32];
  exchange(line, mask, vote, values);
  unsigned votes = 0;
  for (int i = 0; i < 32; i++) {
    if (mask >> i & 1) votes |= (unsigned)values[i] << i;
  }
  return votes;
}

template <class T>
inline T reduce_add(int line, unsigned mask, T value) {
  uint64_t values[32];
  exchange(line, mask, to_bits(value), values);
  T sum = 0;
  for (int i = 0; i < 32; i++) {
    if (mask >> i & 1) sum += from_bits<T>(values[i]);
  }
  return sum;
}

// Calls a kernel with `void** arguments`, as cuLaunchKernel does. A thunk is not checked: the arguments are not memory
// of the kernel.
#define EXECUTOR_UNCHECKED __attribute__((no_sanitize("thread"), no_sanitize("undefined"), noinline))

template <class... A, size_t... I>
EXECUTOR_UNCHECKED void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  (void)arguments;
  kernel(*(std::remove_const_t<A>*)arguments[I]...);
}

template <class... A>
EXECUTOR_UNCHECKED void call(void (*kernel)(A...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<A...>{});
}

template <class... A>
EXECUTOR_UNCHECKED int sizes_of(void (*)(A...), int* sizes) {
  const int found[] = {0, (int)sizeof(A)...};
  for (size_t i = 0; i < sizeof...(A); i++) sizes[i] = found[i + 1];
  return sizeof...(A);
}

}  // namespace executor

#define threadIdx (executor::thread_index())
#define blockIdx (executor::block_index())
#define blockDim (executor::block_size())
#define gridDim (executor::grid_size())
static const int warpSize = 32;
// The one point of dialect: on a GPU this is `extern __shared__ unsigned char name[]`.
#define FMP_DYNAMIC_SHARED(name) unsigned char* name = executor::dynamic_shared_memory()

#define __syncthreads() executor::barrier(__LINE__)
#define __syncthreads_count(p) executor::barrier(__LINE__, executor::Reduction::count, (p))
#define __syncthreads_and(p) executor::barrier(__LINE__, executor::Reduction::all, (p))
#define __syncthreads_or(p) executor::barrier(__LINE__, executor::Reduction::any, (p))
#define __syncwarp(...) executor::warp_barrier(__LINE__ __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...) executor::shuffle_index(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) executor::shuffle_up(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) executor::shuffle_down(__LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) executor::shuffle_xor(__LINE__, __VA_ARGS__)
#define __ballot_sync(mask, vote) executor::ballot(__LINE__, mask, (vote) != 0)
#define __any_sync(mask, vote) (executor::ballot(__LINE__, mask, (vote) != 0) != 0)
#define __all_sync(mask, vote) (executor::ballot(__LINE__, mask, (vote) != 0) == (unsigned)(mask))
#define __reduce_add_sync(mask, value) executor::reduce_add(__LINE__, mask, value)

#define EXECUTOR_EXPORT(kernel) \
  extern "C" EXECUTOR_UNCHECKED void executor_call_##kernel(void** arguments) { executor::call(kernel, arguments); } \
  extern "C" EXECUTOR_UNCHECKED int executor_sizes_##kernel(int* sizes) { return executor::sizes_of(kernel, sizes); }

#include "intrinsics.h"
