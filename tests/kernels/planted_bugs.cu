// Correct kernels that look wrong, and wrong ones that look right: what the checker of the CPU executor is tested on.
typedef unsigned char u8;
typedef unsigned int u32;

extern "C" __global__ void good_ballot(u32* out) {
  const u32 votes = __ballot_sync(0xffffffffu, threadIdx.x % 3 == 0);
  if ((threadIdx.x & 31) == 0) out[threadIdx.x >> 5] = votes;
}

extern "C" __global__ void good_atomics(u32* histogram, const u8* x, int n) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (int i = first; i < n; i += step) atomicAdd(&histogram[x[i]], 1u);
}

extern "C" __global__ void good_parts_of_a_warp(u32* out) {
  const u32 lane = threadIdx.x & 31, half = lane < 16 ? 0xffffu : 0xffff0000u;
  u32 value = __shfl_xor_sync(half, threadIdx.x, 1, 16);
  if (lane >= 16) value += __shfl_xor_sync(0xffff0000u, value, 2, 16);
  out[threadIdx.x] = value;
}

extern "C" __global__ void good_warp_barrier(u32* out) {
  __shared__ u32 shared[64];
  shared[threadIdx.x] = threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = shared[threadIdx.x ^ 1];
}

extern "C" __global__ void good_dynamic(u32* out) {
  FMP_DYNAMIC_SHARED(shared);
  ((u32*)shared)[threadIdx.x] = threadIdx.x;
  const int any = __syncthreads_or(threadIdx.x == 63), all = __syncthreads_and(threadIdx.x < 63);
  const int count = __syncthreads_count(threadIdx.x < 7);
  out[threadIdx.x] = ((u32*)shared)[63 - threadIdx.x] + 1000 * any + 2000 * all + 10000 * count;
}

extern "C" __global__ void good_shared_reuse(u32* out) {
  __shared__ u32 shared[64];
  u32 sum = 0;
  for (u32 i = 0; i < 3; i++) {
    shared[threadIdx.x] = threadIdx.x + i;
    __syncthreads();
    sum += shared[(threadIdx.x + 1) & 63];
    __syncthreads();
  }
  out[threadIdx.x] = sum;
}

extern "C" __global__ void race_without_warp_barrier(u32* out) {
  __shared__ u32 shared[64];
  shared[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = shared[threadIdx.x ^ 1];
}

extern "C" __global__ void race_across_warps(u32* out) {
  __shared__ u32 shared[64];
  shared[threadIdx.x] = threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = shared[threadIdx.x ^ 32];
}

extern "C" __global__ void race_of_blocks(u32* out) { out[0] = blockIdx.x; }

extern "C" __global__ void race_of_a_counter(u32* out) { out[0] += 1; }

extern "C" __global__ void race_of_write_after_read(u32* out) {
  __shared__ u32 shared[64];
  shared[threadIdx.x] = threadIdx.x;
  __syncthreads();
  const u32 neighbor = shared[(threadIdx.x + 1) & 63];
  shared[threadIdx.x] = neighbor;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x];
}

extern "C" __global__ void race_with_many_readers(u32* out) {
  __shared__ u32 shared;
  if (threadIdx.x == 0) shared = 1;
  __syncthreads();
  const u32 read = shared;
  if (threadIdx.x == 5) shared = read + 1;
  out[threadIdx.x] = read;
}

extern "C" __global__ void divergent_barrier(u32* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
    out[threadIdx.x] = 1;
  } else {
    out[threadIdx.x] = 2;
    __syncthreads();
  }
}

extern "C" __global__ void divergent_exit(u32* out) {
  if (threadIdx.x == 5) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

extern "C" __global__ void divergent_shuffle(u32* out) {
  u32 value = 0;
  if (threadIdx.x & 1) value = __shfl_sync(0xffffffffu, threadIdx.x, 0);
  out[threadIdx.x] = value;
}

extern "C" __global__ void divergent_mask(u32* out) { out[threadIdx.x] = __shfl_sync(0xffffu, threadIdx.x, 0); }

extern "C" __global__ void write_to_read_only(u32* out, u8* x) {
  if (threadIdx.x == 0) x[0] = 1;
  out[threadIdx.x] = 0;
}

extern "C" __global__ void bounds_of_global(u32* out) { out[threadIdx.x * 5] = 0; }

extern "C" __global__ void bounds_of_global_below(u32* out) { out[(int)threadIdx.x - 1] = 0; }

extern "C" __global__ void bounds_of_shared(u32* out) {
  __shared__ u32 shared[64];
  shared[threadIdx.x + 1] = 0;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x];
}

extern "C" __global__ void bounds_of_dynamic(u32* out) {
  FMP_DYNAMIC_SHARED(shared);
  ((u32*)shared)[threadIdx.x + 1] = 0;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x];
}

extern "C" __global__ void uninitialized_shared(u32* out) {
  __shared__ u32 shared[64];
  if (threadIdx.x != 7) shared[threadIdx.x] = 0;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x];
}

extern "C" __global__ void undefined_alignment(u32* out) { out[threadIdx.x] = *(const u32*)((const u8*)out + 1); }

extern "C" __global__ void undefined_shift(u32* out) { out[threadIdx.x] = 1u << (threadIdx.x + 1); }

extern "C" __global__ void endless_loop(u32* out) {
  u32 i = 0;
  while (i < 2) i = (i + 1) & 1;
  out[threadIdx.x] = i;
}

extern "C" __global__ void endless_barriers(u32* out) {
  while (__syncthreads_or(1)) continue;
  out[threadIdx.x] = 1;
}
