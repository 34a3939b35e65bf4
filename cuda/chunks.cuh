// Walking over many tensors in one launch, sixteen bytes at a time.
//
// The host writes a table with a row for each tensor, and a list of chunks with an entry for each block:
//
//   entry = (row << 32) | (number of the chunk in its tensor)
//
// Both lie in device memory. A tensor may begin at any element and have any size: its last chunk is short, and an empty
// one has none.
#pragma once
#include "types.cuh"

// A pointer that comes out of a table could point anywhere; told that it is global, the compiler uses LDG and STG.
#ifdef __CUDA_ARCH__
#define ASSUME_GLOBAL(pointer) __builtin_assume(__isGlobal(pointer))
#else
#define ASSUME_GLOBAL(pointer) ((void)0)
#endif

struct chunk {
  u32 row;
  long long first;  // element of the tensor
};

__device__ __forceinline__ chunk chunk_of_block(const u64* chunks, int chunk_size) {
  const u64 entry = chunks[blockIdx.x];
  return chunk{(u32)(entry >> 32), (long long)(entry & 0xffffffffu) * chunk_size};
}

__device__ __forceinline__ int count_of(chunk here, int chunk_size, long long tensor_size) {
  return (int)min((long long)chunk_size, tensor_size - here.first);
}

// Neighbors that are loaded and stored by one instruction.
template <class T, int N>
struct alignas(N * sizeof(T)) pack {
  T v[N];
};

template <int N, class T>
__device__ __forceinline__ pack<T, N> load(const T* from) {
  ASSUME_GLOBAL(from);
  return *(const pack<T, N>*)from;
}

template <int N, class T>
__device__ __forceinline__ void store(T* to, pack<T, N> values) {
  ASSUME_GLOBAL(to);
  *(pack<T, N>*)to = values;
}

// The elements before the first that a pack may begin with.
template <int N, class T>
__device__ __forceinline__ int head_of(const T* stream) {
  const int past = (int)((u64)stream / sizeof(T) % N);
  return past ? N - past : 0;
}

// Says whether packs may begin after the head of another stream in this one too; one that is absent does not mind.
template <int N, class T>
__device__ __forceinline__ bool fits(const T* stream, int head) {
  return !stream || (u64)(stream + head) % (N * sizeof(T)) == 0;
}

template <int W>
struct width {
  static constexpr int value = W;
};

// Visits all elements of a chunk: `use(width, i, load(width, i))` for `width` neighbors from the i-th on. Where packs
// begin after the same head in all streams, `aligned`, most are visited N at a time, and the others one at a time.
//
// A thread first loads up to K packs, then uses them: more bytes are on their way, and results may overwrite inputs,
// which keeps the compiler from doing so by itself. Neighboring threads visit neighboring packs.
template <int N, int K, class Load, class Use>
__device__ __forceinline__ void walk(int count, int head, bool aligned, Load load, Use use) {
  const int thread = (int)threadIdx.x, threads = (int)blockDim.x;
  head = aligned ? min(head, count) : count;
  const int packs = (count - head) / N;
  for (int i = thread; i < head; i += threads) use(width<1>(), i, load(width<1>(), i));
  for (int i = thread; i < packs; i += K * threads) {
    decltype(load(width<N>(), 0)) loaded[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int at = i + k * threads;
      if (at < packs) loaded[k] = load(width<N>(), head + at * N);
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int at = i + k * threads;
      if (at < packs) use(width<N>(), head + at * N, loaded[k]);
    }
  }
  for (int i = head + packs * N + thread; i < count; i += threads) use(width<1>(), i, load(width<1>(), i));
}
