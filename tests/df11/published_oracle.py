"""The published DFloat11 format written out once more, slowly and on its own: what the code under test must agree with.

`kernel` decodes as the published GPU kernel does, thread by thread, so that gaps and output_positions are used and not
only compared.
"""

from typing import Any

import numpy as np


def huffman(counts: dict[int, int]) -> dict[int, str]:
    """The codes of the exponents and, as -1, of the end symbol, as strings of bits."""
    nodes = [((count, symbol), {symbol: ""}) for symbol, count in {-1: 1, **counts}.items()]
    while len(nodes) > 1:
        nodes.sort(key=lambda node: node[0])
        (low, zeros), (high, ones), *nodes = nodes
        merged = {s: "0" + c for s, c in zeros.items()} | {s: "1" + c for s, c in ones.items()}
        nodes.append(((low[0] + high[0], low[1]), merged))
    return nodes[0][1]


def kernel(group: Any) -> np.ndarray:
    """Decodes a group in two phases, with 512 threads of 8 bytes a block. Nothing is checked, walks are unlimited."""
    stream, luts, n = group.encoded_exponent, group.luts.tolist(), len(group.sign_mantissa)
    blocks = -(-len(stream) // 4096)
    padded = bytes(stream) + bytes(4096 * blocks + 16 - len(stream))
    gap_bits = "".join(f"{byte:08b}" for byte in group.gaps.tolist())
    positions = [int.from_bytes(bytes(group.output_positions[4 * b :][:4]), "little") for b in range(blocks + 1)]
    assert len(gap_bits) == blocks * 512 * 5
    assert len(group.output_positions) == 4 * blocks + 4

    out: list[int | None] = [None] * n
    for block in range(blocks):
        index = positions[block]
        for thread in range(512 * block, 512 * block + 512):
            if 8 * thread >= len(stream):
                break
            bit = 64 * thread + int(gap_bits[5 * thread : 5 * thread + 5], 2)
            while bit < 64 * thread + 64:
                window = int.from_bytes(padded[bit // 8 : bit // 8 + 9], "big") << bit % 8 & (1 << 72) - 1
                row, shift = 0, 64
                while (symbol := luts[row][window >> shift & 255]) >= 240:
                    row, shift = 256 - symbol, shift - 8
                assert luts[-1][symbol], "the kernel would never end"
                bit += luts[-1][symbol]
                if index < n:
                    assert out[index] is None
                    out[index] = symbol
                index += 1
    rest = group.sign_mantissa.astype(np.uint16)
    return (rest & 128) << 8 | np.array(out, np.uint16) << 7 | rest & 127


def weights(exponents: Any, seed: int = 0) -> np.ndarray:
    """bf16 numbers, as bits, with given exponents and random signs and mantissas."""
    rest = np.random.default_rng(seed).integers(0, 1 << 16, len(exponents), np.uint16)
    return np.asarray(exponents, np.uint16) << 7 | rest & 0x807F


def gaussian(n: int, seed: int = 0, scale: float = 0.02) -> np.ndarray:
    """Normal random numbers in bf16, as bits."""
    values = np.random.default_rng(seed).normal(0, scale, n).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
