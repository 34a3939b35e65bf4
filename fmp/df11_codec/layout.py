"""How the parts of a compressed tensor lie in memory.

A bf16 number is a sign, 8 bits of exponent and 7 bits of mantissa. The exponents of a weight tensor take few of their
256 values, mostly the same ones: they go into one stream of Huffman codes. Signs and mantissas are noise, and are kept
as they are:

    bf16            s eeeeeeee mmmmmmm
    sign_mantissa   s mmmmmmm                 u8, one a number, in the order of the numbers
    stream          code of eeeeeeee          1 to 12 bits, one a number, in the same order

    numbers         0 ........ 511 | 512 ..... 1023 | 1024 ........     chunks of 512, groups of 32 chunks
    stream          code code ... code code ... code code ...           bit after bit, nothing between chunks
    chunk_bits      1326           | 1319           | ...               u16, the length of each chunk
    group_starts    0              .              . | 42301 ...         i64, where each 32nd chunk starts

The first bit of the stream is the lowest bit of its first byte. Read as little-endian words of 32 or of 64 bits, it is
the same stream. One more word follows the last code, so that two neighboring words can always be read.

Why chunks. A decoder that works in parallel must know where a piece of the stream starts, and which numbers it holds.
The published DFloat11 layout cuts the stream after every 64 bits and stores the offset of the first code in each
piece: 0.20 bits a weight; how many codes a piece holds is found by decoding it twice. A chunk has a fixed number of
numbers, so that its place in the output is known, and one pass is enough. Its length takes 16 / 512 = 0.031 bits a
weight, the starts of the groups 0.004. (256 numbers: 0.070 together, 1024: 0.018.)

On a GPU, a warp takes a group: a scan of 32 lengths within the warp gives each lane its start, the words of the group
(about 5 KiB) come to shared memory in one coalesced copy, and each lane decodes one chunk, 16 numbers at a time: it
reads 16 and writes 32 neighboring bytes, whole sectors of memory. Shorter chunks would give small tensors more lanes,
at the price of bits. On a CPU a thread decodes one chunk after the other; chunks of half the length cost 5 % of the
speed.

The alternative is lanes that share one stream of words: all lanes of a block decode in lock step, and whichever runs
low takes the next word. It stores no lengths, but each lane wastes what it has taken and not used: with words of 32
bits and 512 numbers a lane 0.049 bits a weight, more than the lengths take. It reads its words in order without a copy
to shared memory. But a lane cannot be decoded without the 31 others, each word that is taken needs a vote among all of
them, and a CPU, which has to follow the votes of 32 chains, decodes less than half as fast (measured).
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from fmp.df11_codec import huffman

CHUNK = 512
GROUP = 32
WORD_BITS = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """A sequence of bf16 numbers, compressed.

    Attributes:
        code_lengths: u8[256], the length of each exponent's code, 0 if it does not occur.
        stream: u64[words], the codes.
        chunk_bits: u16[chunks], the number of bits in each chunk.
        group_starts: i64[groups], the position in bits at which each group starts.
        sign_mantissa: u8[numbers], sign and mantissa of each number.
    """

    code_lengths: npt.NDArray[np.uint8]
    stream: npt.NDArray[np.uint64]
    chunk_bits: npt.NDArray[np.uint16]
    group_starts: npt.NDArray[np.int64]
    sign_mantissa: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """The bytes of all parts together."""
        return sum(getattr(self, field.name).nbytes for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The number of elements in each part, and their bytes together."""

    chunks: int
    groups: int
    words: int
    nbytes: int


def sizes(numbers: int, bits: int) -> Sizes:
    """Computes the size of every part.

    Args:
        numbers: How many numbers are compressed.
        bits: How many bits their codes have together.

    Example:
        >>> sizes(2**33, 2**35)
        Sizes(chunks=16777216, groups=524288, words=536870913, nbytes=12922650888)
    """
    chunks = -(-numbers // CHUNK)
    groups = -(-chunks // GROUP)
    words = -(-bits // WORD_BITS) + 1
    return Sizes(chunks, groups, words, huffman.SYMBOLS + 8 * words + 2 * chunks + 8 * groups + numbers)


def group_starts(chunk_bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """Computes where each group starts in the stream: i64[groups], in bits."""
    starts = np.cumsum(np.add.reduceat(chunk_bits, np.arange(0, len(chunk_bits), GROUP), dtype=np.int64))
    return np.concatenate([np.zeros(1, np.int64), starts[:-1]])


def chunk_starts(chunk_bits: npt.NDArray[np.uint16], start: int) -> npt.NDArray[np.int64]:
    """Computes where each of some consecutive chunks starts in the stream, given the start of the first.

    Example:
        >>> chunk_starts(np.array([1300, 1200, 1250], np.uint16), 2**40) - 2**40
        array([   0, 1300, 2500])
    """
    return start + np.cumsum(chunk_bits, dtype=np.int64) - chunk_bits


def check(encoded: Encoded) -> None:
    """Raises unless the parts fit together, so that decoding stays inside of them.

    Raises:
        ValueError: If the code is not complete, the number of chunks, groups or words is wrong, a chunk is shorter or
            longer than its codes can be, the groups do not start where the chunks end, or bits after the last code are
            set.
    """
    huffman.check_lengths(encoded.code_lengths)
    numbers, chunk_bits = encoded.sign_mantissa.size, encoded.chunk_bits
    bits = int(chunk_bits.sum(dtype=np.int64))
    wanted = sizes(numbers, bits)
    found = (chunk_bits.size, encoded.group_starts.size, encoded.stream.size)
    if numbers == 0 or found != (wanted.chunks, wanted.groups, wanted.words):
        raise ValueError(
            f"{numbers} numbers in {bits} bits need {wanted.chunks} chunks, {wanted.groups} groups and {wanted.words} "
            "words, and at least one number; got {} chunks, {} groups and {} words".format(*found)
        )
    counts = np.full(wanted.chunks, CHUNK)
    counts[-1] = numbers - CHUNK * (wanted.chunks - 1)
    lengths = encoded.code_lengths[encoded.code_lengths > 0].astype(np.int64)
    impossible = (chunk_bits < counts * lengths.min()) | (chunk_bits > counts * lengths.max())
    if impossible.any():
        chunk = int(impossible.argmax())
        raise ValueError(f"chunk {chunk} of {counts[chunk]} numbers cannot have {chunk_bits[chunk]} bits")
    if not np.array_equal(encoded.group_starts, group_starts(chunk_bits)):
        raise ValueError("the groups do not start where the lengths of their chunks say")
    last, used = divmod(bits, WORD_BITS)
    if int(encoded.stream[last]) >> used or encoded.stream[-1]:
        raise ValueError("there are bits after the last code")
