"""`fmp.df11.decode_ahead`: weights that will be needed next are decoded while this one is used."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")
Key = tuple[int, int]


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
    before = _current.set(_Ahead(thread, tensors))
    try:
        yield
    finally:
        _current.reset(before)
        thread.shutdown(cancel_futures=True)


def ahead_of_time(decode: Callable[[], T], parts: tuple[torch.Tensor, ...]) -> T:
    """Calls `decode()`, or takes the result from a thread that has called it before.

    Args:
        decode: Decodes one weight. Every result is new.
        parts: What it reads; the last one has memory of its own.
    """
    ahead = _current.get()
    return decode() if ahead is None else ahead.decoded(_Use(decode, parts))


@dataclasses.dataclass(frozen=True)
class _Use(Generic[T]):
    """One use of a weight. It holds the parts, so that no other weight can have their addresses."""

    decode: Callable[[], T]
    parts: tuple[torch.Tensor, ...]

    @property
    def key(self) -> Key:
        return self.parts[-1].data_ptr(), self.parts[-1].numel()

    @property
    def versions(self) -> list[int]:
        return [part._version for part in self.parts]


class _Begun(NamedTuple):
    versions: list[int]
    future: Future[Any]


class _Ahead:
    """Remembers in which order weights were used, and has the next ones decoded in a thread."""

    def __init__(self, thread: ThreadPoolExecutor, most: int):
        self._thread, self._most = thread, most
        self._begun: dict[Key, _Begun] = {}
        self._after: dict[tuple[Key | None, Key | None], Key] = {}
        self._last: tuple[Key | None, Key | None] = (None, None)
        self._uses: dict[Key, tuple[int, _Use[Any]]] = {}  # the longest unused first
        self._count = 0

    def decoded(self, use: _Use[T]) -> T:
        begun = self._begun.pop(use.key, None)
        self._note(use)
        # What waits for the thread is done here at once; a part that was written to since makes the result another's.
        if begun is None or begun.future.cancel() or begun.versions != use.versions:
            self._begin()
            return use.decode()
        result = begun.future.result()
        self._begin()
        return result

    def _note(self, use: _Use[Any]) -> None:
        self._after[self._last] = use.key
        self._last = self._last[1], use.key
        self._uses.pop(use.key, None)
        self._uses[use.key] = self._count, use
        self._count += 1
        # A weight that is gone is not used any more, while a step uses each of its own about twice.
        oldest, (when, _) = next(iter(self._uses.items()))
        if when < self._count - 4 * len(self._uses):
            del self._uses[oldest]
            self._begun.pop(oldest, None)
            self._after = {pair: key for pair, key in self._after.items() if oldest not in (*pair, key)}

    def _begin(self) -> None:
        pair = self._last
        for _ in range(self._most):
            key = self._after.get(pair)
            if key is None:
                return
            if key not in self._begun:
                use = self._uses[key][1]
                self._begun[key] = _Begun(use.versions, self._thread.submit(use.decode))
            pair = pair[1], key


_current: contextvars.ContextVar[_Ahead | None] = contextvars.ContextVar("decode_ahead", default=None)
