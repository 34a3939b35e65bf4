"""Which calls compute nothing: views, copies, selections, and tensors of constants."""

from typing import Final

import torch
from torch import Tensor

from fmp.policy.places import Memory, memory

CASTS: Final = frozenset(
    [Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.type_as]
)

_MOVES = """
    zeros ones empty full arange linspace eye tensor scalar_tensor as_tensor zeros_like ones_like empty_like full_like
    new_zeros new_ones new_empty new_full new_tensor empty_strided new_empty_strided empty_permuted zero fill
    reshape flatten ravel contiguous clone copy cpu cuda to pin_memory __deepcopy__ resolve_conj resolve_neg
    __getitem__ index_put index_select select_scatter slice_scatter gather take take_along_dim masked_select
    cat stack hstack vstack dstack column_stack block_diag repeat repeat_interleave tile
    roll flip fliplr flipud rot90 tril triu diag diag_embed diagonal_scatter pad constant_pad_nd
    pixel_shuffle pixel_unshuffle channel_shuffle pad_sequence _pack_padded_sequence _pad_packed_sequence
"""
_MOVING = frozenset(_MOVES.split())


def memories(tensors: list[Tensor]) -> list[Memory | None]:
    """Finds the memory of each tensor."""
    return [memory(tensor) for tensor in tensors]


def is_view(places: list[Memory | None], inputs: list[Tensor], results: list[Tensor]) -> bool:
    """Says whether what came out of an op lies in the memory of an argument, which has not changed.

    Args:
        places: The memory of the arguments, before the op ran.
        inputs: The arguments.
        results: What came out.
    """
    if not results:
        return False
    given = {place.storage for place in places if place is not None}
    results_in = {None if place is None else place.storage for place in memories(results)}
    dtypes = {tensor.dtype for tensor in inputs}
    return results_in <= given and all(result.dtype in dtypes for result in results) and places == memories(inputs)


def only_moves(op: str, dtypes: set[torch.dtype]) -> bool:
    """Says whether an op without a rule creates, moves or selects numbers of one dtype.

    Args:
        op: The name of the op.
        dtypes: The floating-point dtypes that go in or come out.
    """
    return op in _MOVING and len(dtypes) == 1
