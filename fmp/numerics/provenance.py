"""What is known about memory: the op that wrote each part of it last, and where its inf and NaN came from.

A storage may hold many tensors, such as the rows of a table. So what was written is kept by region, and where inf and
NaN came from by place: a whole number for each, of which 0 says nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fmp.live_memory import Memory, wraps_tensors

_REGIONS = 64  # the oldest of more than these are forgotten, but not their labels


@dataclass(frozen=True)
class Region:
    """The places in a storage that a strided tensor shows, in steps of `itemsize` bytes.

    A complex number is two places.
    """

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(tensor: Tensor) -> "Region":
        """Returns the region of a strided tensor."""
        start, shape, stride, size = int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.itemsize
        if tensor.is_complex():
            return Region(2 * start, (*shape, 2), (*[2 * step for step in stride], 1), size // 2)
        return Region(start, shape, tuple(stride), size)

    @property
    def ends(self) -> tuple[int, int]:
        """The first byte, and the one behind the last."""
        last = self.start + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.start * self.itemsize, (last + 1) * self.itemsize

    @property
    def is_empty(self) -> bool:
        """Whether there are no places in it."""
        return 0 in self.shape

    @property
    def is_dense(self) -> bool:
        """Whether all places from the first to the last one are in it."""
        first, end = self.ends
        count = 1
        for size in self.shape:
            count *= size
        return count * self.itemsize == end - first and 0 not in self.stride

    def covers(self, other: "Region") -> bool:
        """Says whether all places of another region are in this one, as far as that is easy to see."""
        (first, end), (other_first, other_end) = self.ends, other.ends
        return self == other or (self.is_dense and first <= other_first and other_end <= end)

    def meets(self, other: "Region") -> bool:
        """Says whether a place is in both."""
        (first, end), (other_first, other_end) = self.ends, other.ends
        if self.is_empty or other.is_empty or end <= other_first or other_end <= first:
            return False
        if self.covers(other) or other.covers(self):
            return True
        low, high = min(first, other_first), max(end, other_end)
        marks = torch.zeros(high - low, dtype=torch.bool)
        self._bytes(marks, low).fill_(True)
        return bool(other._bytes(marks, low).any())

    def _bytes(self, marks: Tensor, low: int) -> Tensor:
        size = self.itemsize
        steps = [step * size for step in self.stride]
        return marks.as_strided((*self.shape, size), (*steps, 1), self.start * size - low)


@dataclass
class _Trace:
    """What is known about a storage.

    Attributes:
        writes: What was written, and by whom, the latest last.
        labels: Where inf and NaN came from, by place; None if none were there.
        itemsize: The bytes of a place.
    """

    writes: list[tuple[Region, Any]] = field(default_factory=list)
    labels: Tensor | None = None
    itemsize: int = 0


class Provenance:
    """What is known about memory, for as long as that lives.

    Args:
        memory: Returns the record of a storage.
    """

    def __init__(self, memory: Callable[[torch.UntypedStorage], Memory]):
        self._memory = memory

    def origins(self, tensor: Tensor) -> Iterator[Any]:
        """Yields by whom a tensor was written, the latest first."""
        for part in parts(tensor):
            trace, region = self._trace(part), Region.of(part)
            yield from [origin for written, origin in reversed(trace.writes) if written.meets(region)]

    def origin(self, tensor: Tensor) -> Any:
        """Returns by whom a tensor was written last; None if that is not known."""
        return next(self.origins(tensor), None)

    def beside(self, tensor: Tensor) -> list[Any]:
        """Returns by whom the memory was written that a tensor shows a part of, all of it."""
        return [origin for part in parts(tensor) for _, origin in self._trace(part).writes]

    def note(self, tensor: Tensor, origin: Any, labels: Tensor | None = None) -> list[Any]:
        """Notes by whom a tensor was written, and where its inf and NaN came from.

        Returns:
            The origins of what was overwritten.
        """
        lost: list[Any] = []
        for part in parts(tensor):
            trace, region = self._trace(part), Region.of(part)
            lost += [old for written, old in trace.writes if region.covers(written)]
            kept = [pair for pair in trace.writes if not region.covers(pair[0])]
            trace.writes = [*kept[1 - _REGIONS :], (region, origin)]
            if labels is not None or trace.labels is not None:
                shown = self._labels(part, trace)
                shown.zero_() if labels is None else shown.copy_(labels.view(shown.shape))
        return lost

    def labels(self, tensor: Tensor) -> Tensor:
        """Returns where the inf and NaN of a tensor came from, as i32 of its shape; writing there notes it.

        Complex numbers have one more dimension of 2. A tensor made of several has those of the last one, which holds
        the values of a sparse one.
        """
        part = parts(tensor)[-1]
        return self._labels(part, self._trace(part))

    def known_labels(self, tensor: Tensor) -> list[Tensor]:
        """Returns labels as far as there are any where the tensor is."""
        traces = [(part, self._trace(part)) for part in parts(tensor)]
        return [self._labels(part, trace) for part, trace in traces if trace.labels is not None]

    def _trace(self, part: Tensor) -> _Trace:
        memory = self._memory(part.untyped_storage())
        if memory.origin is None:
            memory.origin = _Trace()
        return memory.origin

    def _labels(self, part: Tensor, trace: _Trace) -> Tensor:
        region = Region.of(part)
        places = -(-part.untyped_storage().nbytes() // region.itemsize)
        labels = trace.labels
        if labels is None:
            with torch.inference_mode(False):  # one that is made there could not be written elsewhere
                labels = torch.zeros(places, dtype=torch.int32, device=part.device)
        elif trace.itemsize != region.itemsize:
            by_byte = labels.repeat_interleave(trace.itemsize)
            short = -by_byte.numel() % region.itemsize
            labels = torch.nn.functional.pad(by_byte, (0, short)).view(-1, region.itemsize).amax(1)
        if labels.numel() < places:  # resized
            labels = torch.nn.functional.pad(labels, (0, places - labels.numel()))
        trace.labels, trace.itemsize = labels, region.itemsize
        return labels.as_strided(region.shape, region.stride, region.start)


def parts(tensor: Tensor) -> list[Tensor]:
    """Lists the strided tensors that a tensor is made of; none for layouts that are not looked into."""
    if wraps_tensors(type(tensor)):
        wrapped = [getattr(tensor, name) for name in cast(Any, tensor).__tensor_flatten__()[0]]
        # A DTensor lists its mesh among them.
        return [part for each in wrapped if isinstance(each, Tensor) for part in parts(each)]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout == torch.strided and not tensor.is_nested else []
