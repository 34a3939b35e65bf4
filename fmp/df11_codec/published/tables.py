"""Checks the lookup tables of a published file, and makes the table that decodes most codes in one step."""

import numpy as np
import numpy.typing as npt

from fmp.df11_codec.published.code import FIRST_POINTER, MAX_LENGTH, MAX_ROWS

_WINDOW = 12


def check_tables(luts: npt.NDArray[np.uint8]) -> None:
    """Refuses lookup tables that no prefix code can have.

    A code of `length` bits fills, in a table at depth `(length - 1) // 8`, the entries that begin with its last bits;
    each table but the first has one entry that points to it, in a table one byte shorter. All codes together leave room
    for one more, which ends a stream, or for none. Entries without a code may repeat what stands before them, in the
    same row or at the end of the one before, or hold a symbol that has no code.

    Args:
        luts: u8[rows + 1, 256], the lengths last.

    Raises:
        ValueError: If they are damaged.
    """
    if not 2 <= len(luts) <= MAX_ROWS + 1:
        raise ValueError(f"luts has {len(luts)} rows, and needs 2 to {MAX_ROWS + 1}")
    tables, lengths = luts[:-1], luts[-1].astype(np.int64)
    used = np.flatnonzero(lengths)
    if len(used) == 0 or used[-1] >= FIRST_POINTER or lengths.max() > MAX_LENGTH:
        raise ValueError("luts is damaged: its last row must give lengths of 1 to 32 bits to exponents below 240 only")
    free = (1 << MAX_LENGTH) - sum(1 << MAX_LENGTH - int(length) for length in lengths[used])
    if free < 0 or free & (free - 1):
        raise ValueError("luts is damaged: the lengths in its last row do not make a code with one end symbol, or none")

    depths = _depths(tables)
    regular = _pointers(tables)
    for symbol in used:
        depth, bits = divmod(int(lengths[symbol]) - 1, 8)
        width = 1 << (7 - bits)  # one entry for every value of the byte's bits that belong to the next code
        places = (tables == symbol) & (depths == depth)[:, None]
        whole = places.reshape(len(tables), -1, width).all(2)
        if not whole.any():
            raise ValueError(f"luts is damaged: exponent {symbol} has a length, but no code of that length")
        regular |= np.repeat(whole, width, 1)

    flat, holes = tables.reshape(-1), np.flatnonzero(~regular.reshape(-1))
    nothing = (flat < FIRST_POINTER) & (lengths[flat] == 0)
    stray = holes[(flat[holes] != flat[holes - 1]) & ~nothing[holes]]
    if len(stray) and not (stray[0] == 0 and len(stray) == 1):
        raise ValueError(f"luts is damaged: entry {stray[-1] % 256} of table {stray[-1] // 256} belongs to no code")


def one_step_table(luts: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Makes a table of all codes of at most 12 bits.

    Args:
        luts: u8[rows + 1, 256], checked.

    Returns:
        u16[4096], by the next 12 bits: the length of a code and, in the low byte, its symbol; 0 for all others.
    """
    lowest = np.arange(1 << _WINDOW, dtype=np.uint64) << np.uint64(64 - _WINDOW)
    symbols, lengths = walk(luts, lowest)
    # Where longer codes begin with these bits too, the lowest of them may be an entry that repeats a shorter code.
    others, _ = walk(luts, lowest | np.uint64((1 << 64 - _WINDOW) - 1))
    found = (lengths > 0) & (lengths <= _WINDOW) & (symbols == others)
    return np.where(found, lengths.astype(np.uint16) << 8 | symbols, 0).astype(np.uint16)


def walk(
    luts: npt.NDArray[np.uint8], windows: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Looks up the first code in each of some bit strings.

    Args:
        luts: u8[rows + 1, 256], checked.
        windows: u64[n], the next 64 bits each.

    Returns:
        The symbols and the lengths, u8[n] each; length 0 where the walk finds no symbol within four tables.
    """
    symbols = luts[0, windows >> np.uint64(56)]
    for shift in (48, 40, 32):
        further = np.flatnonzero(symbols >= FIRST_POINTER)
        if len(further) == 0:
            break
        byte = (windows[further] >> np.uint64(shift)) & np.uint64(255)
        symbols[further] = luts[256 - symbols[further].astype(np.int64), byte]
    # Numbers of tables, 240 and above, have no length.
    return symbols, luts[-1][symbols]


def _depths(tables: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Returns the number of bytes before each table's own, which the chain of pointers to it says."""
    depths = np.zeros(len(tables), np.int64)
    stray = tables[(tables >= FIRST_POINTER) & (tables <= 256 - len(tables))]
    if len(stray):
        raise ValueError(f"luts is damaged: it has {len(tables)} tables, and points to table {256 - int(stray[0])}")
    for row in range(1, len(tables)):
        parent = int(np.argmax(tables == 256 - row)) // 256
        if not (tables == 256 - row).any() or parent >= row:
            raise ValueError(f"luts is damaged: nothing before table {row} points to it")
        depths[row] = depths[parent] + 1
    if depths.max() > 3:
        raise ValueError("luts is damaged: its tables are more than four deep")
    return depths


def _pointers(tables: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Marks the first entry that points to each table; others can only be repetitions of it."""
    marks = np.zeros(tables.size, np.bool_)
    for row in range(1, len(tables)):
        marks[np.argmax(tables.reshape(-1) == 256 - row)] = True
    return marks.reshape(tables.shape)
