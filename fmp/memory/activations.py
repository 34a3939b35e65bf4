"""What a transformer keeps for its backward pass, by formula.

Korthikanti et al. count one layer, with s for the length of a sequence, b for the sequences of a batch, h for the width
of a layer, a for the heads, and e for the bytes of a number (2 in 16 bits):

    nothing recomputed      s b h (16 e + 2)  +  a s² b (2 e + 1)      e = 2:  s b h (34 + 5 a s / h)
    selective               s b h (16 e + 2)                           e = 2:  34 s b h
    full                    s b h e                                    e = 2:  2 s b h

Selective recomputes what lies between the two products of an attention: the softmax, its dropout, and their masks. An
attention that never writes its scores to memory, such as FlashAttention, keeps as little. Full recomputes all of a
layer from its input. The terms without e are dropout masks, a byte each.

The logits are  s b v (e + 4 + 4)  for a vocabulary of v: as computed, in float32, and the gradient of these.
"""

import dataclasses

from fmp.memory.checks import whole

REMAT = ("none", "selective", "full")
_LIMIT = 2**40  # of a size


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer, for the activations that one device keeps.

    Args:
        layers: How many layers there are.
        hidden: The width of a layer.
        heads: The attention heads of a layer.
        sequence: The length of a sequence.
        batch: The sequences of one microbatch on one device.
        vocabulary: The size of the vocabulary; 0 leaves out the logits.

    Raises:
        ValueError: If a size is no whole number in its range.

    References:
        Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, arXiv:2205.05198,
        equations 1, 2 and 6, without tensor parallelism.

    Example:
        >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, batch=1)
        >>> [round(gpt3.layer_bytes(remat) / 2**30, 2) for remat in REMAT]
        [2.67, 0.8, 0.05]
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int = 1
    vocabulary: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "vocabulary" else 1
            object.__setattr__(self, field.name, whole(f"Transformer: {field.name}", value, least, _LIMIT))

    def layer_bytes(self, remat: str | bool = "none", itemsize: int = 2) -> int:
        """Counts what one layer keeps.

        Args:
            remat: What is recomputed: `"none"` or False, `"selective"`, `"full"` or True.
            itemsize: The bytes of an activation.

        Raises:
            ValueError: If `remat` is none of these, or `itemsize` no whole number from 1.
        """
        remat = remat_name(remat)
        itemsize = whole("itemsize", itemsize, 1, _LIMIT)
        rows = self.sequence * self.batch * self.hidden
        scores = self.heads * self.sequence**2 * self.batch
        if remat == "full":
            return rows * itemsize
        within = rows * (16 * itemsize + 2)
        return within if remat == "selective" else within + scores * (2 * itemsize + 1)

    def logit_bytes(self, itemsize: int = 2) -> int:
        """Counts the logits, their float32 copy and its gradient."""
        itemsize = whole("itemsize", itemsize, 1, _LIMIT)
        return self.sequence * self.batch * self.vocabulary * (itemsize + 4 + 4)

    def activation_bytes(self, remat: str | bool = "none", itemsize: int = 2) -> int:
        """Counts what all layers keep, and the logits.

        As in the paper, what a layer takes while it is being recomputed is not counted.

        Example:
            >>> small = Transformer(layers=2, hidden=64, heads=4, sequence=32, batch=2)
            >>> [small.activation_bytes(remat) for remat in REMAT]
            [360448, 278528, 16384]
        """
        return self.layers * self.layer_bytes(remat, itemsize) + self.logit_bytes(itemsize)


def remat_name(remat: str | bool) -> str:
    """Returns the name of a way to recompute: True is `"full"`, False is `"none"`.

    Raises:
        ValueError: If it is none of these, nor `"selective"`.
    """
    if isinstance(remat, bool):
        return "full" if remat else "none"
    if not isinstance(remat, str) or remat not in REMAT:
        raise ValueError(f"remat must be one of {', '.join(map(repr, REMAT))}, True or False, got {remat!r}")
    return remat
