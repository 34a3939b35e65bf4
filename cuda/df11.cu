// Restores bf16 numbers from the native DF11 layout, many tensors in one launch; see fmp/df11_codec/layout.py.
//
//   block    128 Ki numbers of one tensor: builds its table, then
//   warp     a group of 32 chunks: a scan of their lengths says where each one starts
//   lane     a chunk of 512 numbers: code by code out of a buffer of 64 bits, refilled by words of 32
//
// Whatever the input says, nothing outside of the tensors is touched and every loop ends: the count of numbers comes from
// the row alone, words beyond the stream read as zero, and a code of no length stands still. What does not fit together
// is reported instead: damaged[row] is set if the code is not complete, a chunk does not have the length kept for it, a
// group does not begin in the stream and where the one before ends, or the stream does not end where the last one does.
#include "chunks.cuh"

constexpr int MAX_LENGTH = 12, TABLE = 1 << MAX_LENGTH, SYMBOLS = 256;
constexpr int CHUNK = 512, GROUP = 32, WARPS = 8;
constexpr int STEP = 16;  // numbers that a lane restores between two accesses to memory

struct df11_row {
  const u8* code_lengths;
  const u32* stream;
  const u16* chunk_bits;
  const long long* group_starts;
  const u8* sign_mantissa;
  long long offset;  // of the first number from `outs`
  long long numbers;
  long long words;  // of 32 bits in the stream
};

// Maps the next 12 bits of a stream to `length << 8 | symbol`. In the order of (length, symbol), a code of L bits owns
// the next 2**(12 - L) numbers of 12 bits; turned around, for the first bit of a stream is the lowest, they are its
// places in the table.
__device__ __forceinline__ bool build_table(const u8* code_lengths, u8* lengths, u16* table) {
  __shared__ u16 places[SYMBOLS];
  const int thread = (int)threadIdx.x;
  ASSUME_GLOBAL(code_lengths);
  const int own = code_lengths[thread];
  lengths[thread] = own <= MAX_LENGTH ? (u8)own : (u8)0;
  for (int i = thread; i < TABLE; i += SYMBOLS) table[i] = 0;
  __syncthreads();

  int place = 0, all = 0, used = 0;
  for (int symbol = 0; symbol < SYMBOLS; symbol++) {
    const int length = lengths[symbol];
    const int entries = length ? TABLE >> length : 0;
    if (length < own || (length == own && symbol < thread)) place += entries;
    all += entries;
    used += length != 0;
  }
  places[thread] = (u16)min(place, TABLE);
  __syncthreads();

  for (int symbol = 0; symbol < SYMBOLS; symbol++) {
    const int length = lengths[symbol];
    if (!length) continue;
    const int end = min(places[symbol] + (TABLE >> length), TABLE);
    for (int i = places[symbol] + thread; i < end; i += SYMBOLS) {
      table[__brev((u32)i) >> (32 - MAX_LENGTH)] = (u16)(length << 8 | symbol);
    }
  }
  const bool complete = all == TABLE || (used == 1 && all == TABLE / 2);
  return __syncthreads_or(own > MAX_LENGTH) == 0 && complete;
}

// Reads codes from a stream, the lowest bit first.
struct reader {
  const u32* stream;
  u64 words, next;
  u64 bits;
  int have;
  u32 used;

  __device__ __forceinline__ reader(const u32* stream, long long words, long long position)
      : stream(stream), words((u64)words), next((u64)position / 32), bits(0), have(0), used(0) {
    refill();
    const int before = (int)((u64)position % 32);
    bits >>= before;
    have -= before;
    refill();
  }

  // Leaves 32 bits or more: enough for two codes.
  __device__ __forceinline__ void refill() {
    if (have >= 32) return;
    const u32* word = stream + next;
    ASSUME_GLOBAL(word);
    bits |= (u64)(next < words ? *word : 0u) << have;
    have += 32;
    next++;
  }

  __device__ __forceinline__ u32 symbol(const u16* table) {
    const u32 entry = table[bits & (TABLE - 1)], length = entry >> 8;
    bits >>= length;
    have -= (int)length;
    used += length;
    return entry & 255u;
  }
};

// Says whether a group that ends at a bit is followed by the next one, or by nothing but unset bits.
__device__ __forceinline__ bool ends_well(const df11_row& row, long long group, long long end) {
  ASSUME_GLOBAL(row.group_starts);
  ASSUME_GLOBAL(row.stream);
  if (group == 0 && row.group_starts[0] != 0) return false;
  if ((group + 1) * GROUP * CHUNK < row.numbers) return row.group_starts[group + 1] == end;
  if (row.words != 2 * ((end + 63) / 64 + 1)) return false;
  u32 left = row.stream[end / 32] >> end % 32;
  for (long long word = end / 32 + 1; word < row.words; word++) left |= row.stream[word];  // at most three
  return left == 0;
}

__device__ __forceinline__ u16 number(u32 sign_mantissa, u32 exponent) {
  return (u16)((sign_mantissa & 0x80u) << 8 | exponent << 7 | (sign_mantissa & 0x7fu));
}

extern "C" __global__ void __launch_bounds__(GROUP* WARPS)
    df11_decode(const df11_row* rows, const u64* blocks, u16* outs, u32* damaged) {
  __shared__ u16 table[TABLE];
  __shared__ u8 lengths[SYMBOLS];
  const chunk here = chunk_of_block(blocks, CHUNK * GROUP * WARPS);
  const df11_row row = rows[here.row];
  bool fits_together = build_table(row.code_lengths, lengths, table);

  const int lane = (int)threadIdx.x % GROUP;
  const long long group = here.first / (CHUNK * GROUP) + threadIdx.x / GROUP;
  const long long own = group * GROUP + lane, first = own * CHUNK;
  const int count = (int)max(min((long long)CHUNK, row.numbers - first), 0ll);
  int bits = 0;
  if (count) {
    const u16* from = row.chunk_bits + own;
    ASSUME_GLOBAL(from);
    bits = *from;
  }
  int end = bits;
#pragma unroll
  for (int distance = 1; distance < GROUP; distance *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, end, distance);
    if (lane >= distance) end += below;
  }
  const int all = __shfl_sync(0xffffffffu, end, GROUP - 1);
  if (count) {
    const long long* kept = row.group_starts + group;
    ASSUME_GLOBAL(kept);
    const bool is_inside = (u64)*kept <= 32 * (u64)row.words;  // so that no sum overflows
    const long long start = is_inside ? *kept : 0;
    fits_together &= is_inside;
    if (lane == 0) fits_together &= ends_well(row, group, start + all);
    reader codes(row.stream, row.words, start + end - bits);
    const u8* in = row.sign_mantissa + first;
    u16* out = outs + row.offset + first;
    const bool aligned = fits<STEP>(in, 0) && fits<STEP / 2>(out, 0);
    int done = 0;
    for (; aligned && done + STEP <= count; done += STEP) {
      const pack<u8, STEP> rest = load<STEP>(in + done);
#pragma unroll
      for (int half = 0; half < STEP; half += STEP / 2) {
        pack<u16, STEP / 2> numbers;
#pragma unroll
        for (int k = 0; k < STEP / 2; k++) {
          if (k % 2 == 0) codes.refill();
          numbers.v[k] = number(rest.v[half + k], codes.symbol(table));
        }
        store(out + done + half, numbers);
      }
    }
    for (; done < count; done++) {
      codes.refill();
      out[done] = number(in[done], codes.symbol(table));
    }
    fits_together &= codes.used == (u32)bits;
  }
  if (!fits_together) atomicOr(damaged + here.row, 1u);
}
