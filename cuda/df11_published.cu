// Restores bf16 numbers from the published DFloat11 layout, which fmp/df11_codec/published/groups.py describes.
//
//   block    4096 bytes of the codes: says how many of them start in each chunk, a scan where their numbers go, then
//            decodes them once more, into shared memory, from where numbers go to memory side by side
//   thread   a chunk of 8 bytes: owns the codes that start in it, the first of them where `gaps` says
//
// Whatever the input says, nothing outside of the tensors is touched and every loop ends: sizes come from the host
// alone, bytes beyond the codes read as zero, and what is not a code ends its chunk. What does not fit together sets
// `damaged`: a chunk's codes do not end where the next one's begin, those of a block are not as many as `positions` says,
// one of them is none, or the last one does not end in the last byte. A block with another number of codes than it should
// have writes nothing. Whether the tables are those of a code, the host must check.
#include "chunks.cuh"

constexpr int THREADS = 512, CHUNK = 8, CHUNK_BITS = 8 * CHUNK, WARPS = THREADS / 32;
constexpr int MOST_TABLES = 17, DEEPEST = 4, MAX_LENGTH = 32;
constexpr int FIRST_POINTER = 240;  // an entry from here on is 256 minus the number of a table
constexpr u32 FURTHER = 0x8000;     // marks such an entry in shared memory, where it holds the table's first place
constexpr int STEP = 8;             // numbers that are written at once

// Entries become `length << 8 | symbol`, and 0 if there is no code.
__device__ __forceinline__ void read_tables(const u8* luts, int count, u16* tables) {
  ASSUME_GLOBAL(luts);
  for (int i = (int)threadIdx.x; i < 256 * count; i += THREADS) {
    const int entry = luts[i], table = 256 - entry;
    if (entry >= FIRST_POINTER) {
      tables[i] = table < count ? (u16)(FURTHER | 256u * table) : (u16)0;
    } else {
      const int length = luts[256 * count + entry];
      tables[i] = 0 < length && length <= MAX_LENGTH ? (u16)(length << 8 | entry) : (u16)0;
    }
  }
}

// The codes that start in a chunk: its bits, the highest first, and what may belong to the last of them.
struct codes {
  u32 high, low, beyond;

  // Returns the entry of the code that starts at a bit.
  __device__ __forceinline__ u32 at(int bit, const u16* tables) const {
    const u32 window = bit < 32 ? __funnelshift_l(low, high, bit) : __funnelshift_l(beyond, low, bit);
    u32 entry = tables[window >> 24];
#pragma unroll
    for (int depth = 1; depth < DEEPEST; depth++) {
      if (!(entry & FURTHER)) break;
      entry = tables[(entry & ~FURTHER) + (window >> (24 - 8 * depth) & 255u)];
    }
    return entry & FURTHER ? 0u : entry;
  }
};

// Returns where the next code starts. What is no code is as long as a chunk.
__device__ __forceinline__ int behind(int bit, u32 entry) { return bit + (entry ? (int)(entry >> 8) : CHUNK_BITS); }

__device__ __forceinline__ u32 four_bytes(const u8* stream, u32 size, u32 at) {
  u32 word = 0;
#pragma unroll
  for (u32 k = 0; k < 4; k++) word = word << 8 | (at + k < size ? stream[at + k] : 0u);
  return word;
}

__device__ __forceinline__ codes read_codes(const u8* stream, u32 size, u32 at) {
  ASSUME_GLOBAL(stream);
  if (fits<CHUNK>(stream, 0) && at + CHUNK + 4 <= size) {
    const pack<u32, 2> own = load<2>((const u32*)(stream + at));
    const pack<u32, 1> next = load<1>((const u32*)(stream + at + CHUNK));
    const auto swapped = [](u32 word) { return __byte_perm(word, 0, 0x0123); };
    return codes{swapped(own.v[0]), swapped(own.v[1]), swapped(next.v[0])};
  }
  return codes{four_bytes(stream, size, at), four_bytes(stream, size, at + 4), four_bytes(stream, size, at + 8)};
}

// Returns the bit of a chunk at which its first code starts: five bits of a stream, the highest first.
__device__ __forceinline__ int gap_of(const u8* gaps, u32 chunk) {
  ASSUME_GLOBAL(gaps);
  const u32 byte = 5 * chunk / 8, shift = 5 * chunk % 8;
  const u32 both = (u32)gaps[byte] << 8 | (shift > 3 ? gaps[byte + 1] : 0u);
  return (int)(both >> (11 - shift) & 31u);
}

// Returns the index of the first number of a block, or their number behind the last entry, of which one may be missing.
__device__ __forceinline__ u32 position_of(const u8* positions, u32 entries, u32 block, u32 numbers) {
  ASSUME_GLOBAL(positions);
  if (block >= entries) return numbers;
  const u8* entry = positions + 4 * (u64)block;
  return entry[0] | (u32)entry[1] << 8 | (u32)entry[2] << 16 | (u32)entry[3] << 24;
}

// Returns how many codes start in the chunks before a thread's own, and sets how many in all of its block.
__device__ __forceinline__ u32 scan(u32 own, u32* all) {
  __shared__ u32 totals[WARPS];
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  u32 until = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 below = __shfl_up_sync(0xffffffffu, until, distance);
    if (lane >= distance) until += below;
  }
  if (lane == 31) totals[warp] = until;
  __syncthreads();
  u32 before = 0, sum = 0;
#pragma unroll
  for (int other = 0; other < WARPS; other++) {
    if (other == warp) before = sum;
    sum += totals[other];
  }
  *all = sum;
  return before + until - own;
}

// Says whether the codes of a chunk end, at a bit counted from its first, where they should: before them is the first
// of the next chunk, or, if there are no more numbers, the end of the last byte.
__device__ __forceinline__ bool ends_well(const u8* gaps, u32 chunk, int end, bool is_last, u32 size) {
  const int over = end - CHUNK_BITS;
  const bool has_next = chunk + 1 < gridDim.x * THREADS;
  if (!is_last) return over >= 0 && has_next && gap_of(gaps, chunk + 1) == over;
  if (CHUNK * chunk + (u32)(end + 7) / 8 != size) return false;
  if (over < 0 || !has_next) return true;
  const int gap = gap_of(gaps, chunk + 1);  // where the last byte is filled up there, this may be recorded
  return gap == 0 || gap == over;
}

__device__ __forceinline__ u16 number(u32 sign_mantissa, u32 exponent) {
  return (u16)((sign_mantissa & 0x80u) << 8 | exponent << 7 | (sign_mantissa & 0x7fu));
}

// Writes a block's numbers: STEP at a time, from the first on at which `in` and `out` allow it.
__device__ __forceinline__ void write_numbers(const u8* in, const u8* exponents, u16* out, int head, int count) {
  const auto read = [&](auto w, int i) { return load<decltype(w)::value>(in + i); };
  const auto use = [&](auto w, int i, auto rest) {
    constexpr int W = decltype(w)::value;
    const pack<u8, W> high = *(const pack<u8, W>*)(exponents + i);
    pack<u16, W> numbers;
#pragma unroll
    for (int k = 0; k < W; k++) numbers.v[k] = number(rest.v[k], high.v[k]);
    store(out + i, numbers);
  };
  walk<STEP, 2>(count, head, fits<STEP>(out, head), read, use);
}

// The grid has a block for each 4096 bytes of the `size` of the stream; `entries` is that of `positions`.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    df11_published_decode(const u8* luts, const u8* stream, const u8* sign_mantissa, const u8* positions,
                          const u8* gaps, u16* out, u32* damaged, u32 tables, u32 size, u32 numbers, u32 entries) {
  __shared__ u16 table[256 * MOST_TABLES];
  alignas(STEP) __shared__ u8 exponents[THREADS * CHUNK_BITS + STEP];
  read_tables(luts, min((int)tables, MOST_TABLES), table);
  __syncthreads();

  const u32 block = blockIdx.x, chunk = block * THREADS + threadIdx.x, byte = CHUNK * chunk;
  const codes own = read_codes(stream, size, byte);
  const int gap = gap_of(gaps, chunk), bits = byte < size ? CHUNK_BITS : 0;
  u32 count = 0, all;
  for (int bit = gap; bit < bits; bit = behind(bit, own.at(bit, table))) count++;
  const u32 before = scan(count, &all);

  const bool is_last = block + 1 == gridDim.x;
  const u32 first = position_of(positions, entries, block, numbers);
  const u32 end = position_of(positions, entries, block + 1, numbers);
  bool fits_together = first <= end && (block != 0 || first == 0);
  fits_together &= is_last ? end == numbers && all >= end - first : end <= numbers && all == end - first;
  if (!fits_together) {
    if (threadIdx.x == 0) atomicOr(damaged, 1u);
    return;
  }

  const u8* in = sign_mantissa + first;
  const int head = head_of<STEP>(in), shift = (STEP - head) % STEP;
  const u32 here = end - first, mine = before < here ? min(count, here - before) : 0u;
  int bit = gap;
  for (u32 k = 0; k < mine; k++) {
    const u32 entry = own.at(bit, table);
    exponents[shift + before + k] = (u8)entry;
    bit = behind(bit, entry);
    fits_together &= entry != 0;
  }
  if (mine) {
    fits_together &= ends_well(gaps, chunk, bit, first + before + mine == numbers, size);
  } else {
    fits_together &= gap == 0 || byte < size;  // the last code may end here, which is checked where it starts
  }
  if (chunk == 0) fits_together &= gap == 0;
  __syncthreads();
  write_numbers(in, exponents + shift, out + first, head, (int)here);
  if (!fits_together) atomicOr(damaged, 1u);
}
