"""`fmp.df11.decode_ahead`: weights that will be needed next are decoded while this one is used."""

import contextlib
import contextvars
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
Key = tuple[int, ...]
Parts = tuple[torch.Tensor, ...]


@contextlib.contextmanager
def decode_ahead(tensors: int = 1) -> Iterator[None]:
    """Decodes compressed weights ahead of their use, in a thread, while the operators before them run.

    A step uses its weights in the same order every time: those of its blocks forward, then backward. In plain Python:

        after[previous, this] = next          noted the first time
        decode(this):                         each time
            weight = the thread's result if it was told to decode this, else decode it now
            tell the thread to decode after[previous, this]
            return weight

    The results are the same bits; a wrong guess costs the time of the thread, no more. It pays where a core is free:
    give torch fewer threads than the machine has cores. Every function of `fmp.df11` that decodes makes use of it,
    `frozen` and `FrozenWeight` included, in the thread that entered the context; autograd runs the backward pass of
    tensors on the CPU in the thread that asks for it.

    Args:
        tensors: How many tensors at most to decode ahead. Each takes its decoded size in memory until it is used. With
            `fmp.df11.frozen`, a block decodes all of its weights before it computes; so give their number.

    Raises:
        TypeError: If `tensors` is not an int.
        ValueError: If it is less than 1.

    Example:
        >>> weight = fmp.df11.FrozenWeight(fmp.df11.compress(torch.full((64, 128), 0.5).bfloat16()))
        >>> with decode_ahead():
        ...     sums = [weight.sum().item() for _ in range(3)]
        >>> sums
        [4096.0, 4096.0, 4096.0]
    """
    if isinstance(tensors, bool) or not isinstance(tensors, int):
        raise TypeError(f"tensors must be an int, got {tensors!r}")
    if tensors < 1:
        raise ValueError(f"tensors must be at least 1, got {tensors}")
    thread = ThreadPoolExecutor(1, thread_name_prefix="fmp-df11")
    ahead = _Ahead(thread, tensors)
    before = _current.set(ahead)
    try:
        yield
    finally:
        _current.reset(before)
        ahead.end()


def ahead_of_time(decode: Callable[[Parts], T], parts: Parts, shape: torch.Size) -> T:
    """Returns `decode(parts)`, or what a thread has made of them before.

    Args:
        decode: Decodes one weight into new memory.
        parts: What it reads.
        shape: The shape of the result.
    """
    ahead = _current.get()
    return decode(parts) if ahead is None else ahead.decoded(decode, parts, shape)


class _Place(NamedTuple):
    """Where a part lies. It does not keep the part alive."""

    storage: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def part(self) -> torch.Tensor | None:
        """Finds the part, or None if its weight is gone."""
        storage = self.storage()
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.stride
        )


class _Use(NamedTuple):
    """How a weight was last decoded, and how often its parts had been written to."""

    decode: Callable[[Parts], Any]
    places: list[_Place]
    versions: list[int]


class _Begun(NamedTuple):
    versions: list[int]
    future: Future[Any]


class _Ahead:
    """Remembers in which order weights were used, and has the next ones decoded in a thread."""

    def __init__(self, thread: ThreadPoolExecutor, most: int):
        self._thread, self._most, self._process = thread, most, os.getpid()
        self._begun: dict[Key, _Begun] = {}
        self._uses: dict[Key, _Use] = {}
        self._after: dict[tuple[Key, Key], Key] = {}
        self._last: tuple[Key, Key] = (), ()
        self._swept = 0

    def decoded(self, decode: Callable[[Parts], T], parts: Parts, shape: torch.Size) -> T:
        if os.getpid() != self._process:  # a fork has no threads
            return decode(parts)
        key = (*[part.data_ptr() for part in parts], *shape)
        use = _Use(decode, [_place(part) for part in parts], [_version(part) for part in parts])
        begun = self._begun.pop(key, None)
        self._after[self._last] = key
        self._last, self._uses[key] = (self._last[1], key), use
        self._sweep()
        # What still waits for the thread is done here at once. A part that was written to since is another weight.
        if begun is None or begun.future.cancel() or begun.versions != use.versions:
            self._begin()
            return decode(parts)
        result = begun.future.result()
        self._begin()
        return result

    def end(self) -> None:
        """Ends the thread; whoever still has the context decodes by himself."""
        self._most = 0
        if os.getpid() == self._process:
            self._thread.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        """Begins what is expected next, and drops what is not."""
        expected: dict[Key, _Begun] = {}
        pair = self._last
        for _ in range(self._most):
            key = self._after.get(pair)
            use = None if key is None else self._uses.get(key)
            if key is None or use is None:
                break
            if key not in expected:
                begun = self._begun.pop(key, None) or self._submitted(use)
                if begun is not None:
                    expected[key] = begun
            pair = pair[1], key
        for begun in self._begun.values():
            begun.future.cancel()
        self._begun = expected

    def _submitted(self, use: _Use) -> _Begun | None:
        parts = [part for place in use.places if (part := place.part()) is not None]
        if len(parts) < len(use.places):
            return None
        return _Begun(use.versions, self._thread.submit(use.decode, tuple(parts)))

    def _sweep(self) -> None:
        """Forgets weights that are gone, each time that the number of known ones has doubled."""
        if len(self._uses) <= self._swept:
            return
        gone = {key for key, use in self._uses.items() if any(place.storage() is None for place in use.places)}
        self._uses = {key: use for key, use in self._uses.items() if key not in gone}
        self._after = {pair: key for pair, key in self._after.items() if gone.isdisjoint((*pair, key))}
        self._swept = 2 * len(self._uses) + 16


def _place(part: torch.Tensor) -> _Place:
    storage = weakref.ref(part.untyped_storage())
    return _Place(storage, part.dtype, int(part.storage_offset()), part.shape, part.stride())


def _version(part: torch.Tensor) -> int:
    return 0 if part.is_inference() else part._version  # inference tensors have none


_current: contextvars.ContextVar[_Ahead | None] = contextvars.ContextVar("decode_ahead", default=None)
