"""What is refused in a function given to remat, because its gradient would be wrong without a word."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fmp import _compat, tree
from fmp.errors import RematError
from fmp.rematerialization.capture import Capture

DeterminismCheck = Literal["default", "none", "bitwise"]

_PASS = (
    "pass it as an argument. remat finds by itself what is in closures, default arguments, partials, global variables, "
    "bound methods, modules and containers, but not what is an attribute of another object"
)


# These say nothing about the numbers.
_HARMLESS = (
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point),
)


# What may read values where no dispatch mode sees it, as does a torch.autograd.Function: it may launch a kernel itself.
_OPAQUE = (Tensor.__repr__, Tensor.__format__, Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage)


_WRAPPABLE = (torch.strided, torch.sparse_coo, torch.jagged)


# What torch says of autograd within a transform of torch.func.
_AUTOGRAD_REFUSED = "attempting to call Tensor.requires_grad_()"


class Guard(TorchFunctionMode):
    """Raises when a torch function reads a tensor of a transform that is not in progress here.

    A torch.autograd.Function runs below the transforms around it. There, torch takes such a tensor for a constant.

    Args:
        levels: How many transforms are in progress around the call, but not here, if those that the function begins
            count from there.

    Attributes:
        has_met_opaque: Whether something was called that may read values without running an operator.
    """

    def __init__(self, levels: int = 0):
        super().__init__()
        self._hidden = range(len(_compat.transforms()) + 1, levels + 1)
        self._made: list[weakref.ref[Tensor]] = []
        self.has_met_opaque = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Checks one call, then makes it."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a compiled block inside, which is given all that it reads
            return func(*args, **kwargs)
        self._check(func, args)
        self._check(func, kwargs.values())
        if isinstance(func, _compat.HigherOrderOperator) or func in _OPAQUE:
            self.has_met_opaque = True
        result = func(*args, **kwargs)
        for each in result if isinstance(result, list | tuple) else (result,):
            if isinstance(each, Tensor):
                self._made.append(weakref.ref(each))
        return result

    def release(self) -> None:
        """Frees constants that were made here, and that something holds on to, from transforms that have ended.

        Such is what a hook logs. One that depends on a variable is left: a transform that reads it raises, which is
        better than a gradient that lacks it.
        """
        for made in self._made:
            tensor = made()
            if tensor is not None and _compat.ended_twice(tensor) and not tensor.requires_grad:
                _compat.unwrap_in_place(tensor)
        self._made = []

    def _check(self, func: Any, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                if _compat.wrapped_by_transform(value) and self._is_tracked(value) and func not in _HARMLESS:
                    raise RematError(
                        f"remat: {getattr(func, '__name__', func)} reads a tensor, {tree.describe(value)}, that a "
                        "transform around the call tracks and that is no operand of the function, so it would get no "
                        f"gradient; {_PASS}"
                    )
            elif isinstance(value, list | tuple):
                self._check(func, value)

    def _is_tracked(self, tensor: Tensor) -> bool:
        kinds = _compat.transforms()
        return _compat.level_of(tensor) in self._hidden or _compat.belongs_to_ended_level(tensor, kinds)


def check_layouts(capture: Capture) -> None:
    """Refuses operands that torch.func cannot wrap: compressed sparse tensors, and nested ones that are not jagged.

    Raises:
        RematError: If there is one, naming it.
    """
    for slot, tensor in enumerate(capture.tensors):
        if tensor.layout not in _WRAPPABLE or (tensor.is_nested and tensor.layout == torch.strided):
            layout = "nested" if tensor.is_nested else tensor.layout
            raise RematError(
                f"remat: {capture.name(slot)} is {layout}, which no transform of torch.func can be given, with or "
                "without remat; pass a dense or sparse COO tensor, or a nested one with layout=torch.jagged"
            )


def check_not_recorded(result: Any) -> None:
    """Refuses a result that autograd has recorded although no operand required grad.

    Raises:
        RematError: If there is one.
    """
    for path, leaf in tree.items(result):
        if isinstance(leaf, Tensor) and _compat.below_transforms(leaf).requires_grad:
            raise RematError(
                f"remat: the result{f' {path!r}' if path else ''}, {tree.describe(leaf)}, was computed from a tensor "
                f"that requires grad and is no operand of the function, so it would get no gradient; {_PASS}"
            )


def check_no_autograd_inside(error: RuntimeError) -> None:
    """Says of an error of torch.func, which refuses ordinary autograd inside of a transform, that remat is one.

    Raises:
        RematError: If the error is one of these. If torch refuses hooks that are set around the call, it says so in
            torch's words: a remat around, which has set them, then works without.
    """
    if _compat.refuses_saved_tensor_hooks(error) and _compat.saved_tensors_are_hooked():
        raise RematError(
            "remat: the call is below saved-tensor hooks, such as those of torch.utils.checkpoint. It uses torch.func, "
            "as under a transform, with determinism_check='bitwise', or if the function calls one, and that does not "
            "yet support saved tensor hooks; use fmp.remat instead of torch.utils.checkpoint, or leave out the hooks"
        ) from error
    if _AUTOGRAD_REFUSED in str(error) or _compat.refuses_saved_tensor_hooks(error):
        raise RematError(
            "remat: the function uses ordinary autograd: requires_grad_(), torch.autograd or torch.utils.checkpoint. "
            "Where remat uses torch.func, such as under a transform, with determinism_check='bitwise', or if the "
            "function calls a transform as well, torch allows none inside; use torch.func.grad and fmp.remat there"
        ) from error


def versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """Reads how often each tensor was changed in place, below all transforms; inference tensors do not know."""
    memory = map(_compat.below_transforms, tensors)
    return [None if tensor.is_inference() else tensor._version for tensor in memory]


def check_not_written(before: Sequence[int | None], operands: Sequence[Tensor], capture: Capture) -> None:
    """Refuses a function that changed an operand in place: recomputed, it would read what it wrote.

    Raises:
        RematError: If there is one, naming it.
    """
    after = versions(operands)
    if after == before:
        return
    for slot, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            raise RematError(
                f"remat: the function changed {capture.name(slot)}, {tree.describe(operands[slot])}, in place; "
                "recomputed, it would read what it wrote. Return the new value instead; for a module with buffers, "
                "such as BatchNorm, use fmp.functionalize(module).apply, which returns them"
            )


class Determinism:
    """Compares what a function returned when it was recomputed with what it returned at first.

    Args:
        check: "default" compares number, shapes, dtypes and devices of the results, "bitwise" their bits too, for which
            they are kept, and "none" nothing.
    """

    def __init__(self, check: DeterminismCheck):
        self._check = check
        self._first: list[tuple[Any, ...]] = []

    def note(self, result: Any) -> None:
        """Takes note of the first result."""
        if self._check != "none":
            self._first = [self._facts(leaf) for leaf in tree.leaves(result)]

    def compare(self, result: Any) -> None:
        """Compares another result.

        Raises:
            RematError: If it differs, naming the leaf, what was returned at first, and what was returned now.
        """
        if self._check == "none":
            return
        now = [self._facts(leaf) for leaf in tree.leaves(result)]
        if len(now) != len(self._first):
            raise RematError(
                f"remat: the function returned {len(self._first)} leaves at first and {len(now)} when it was "
                "recomputed; it must not depend on state that changes"
            )
        for path, old, new in zip(tree.paths(result), self._first, now, strict=True):
            if old[:2] != new[:2]:
                self._refuse(path, f"{old[0]} on {old[1]}", f"{new[0]} on {new[1]}")
            if self._check == "bitwise" and old[2] is not None:
                self._compare_bits(path, old[2], new[2])

    def _facts(self, leaf: Any) -> tuple[Any, ...]:
        if not isinstance(leaf, Tensor):
            return type(leaf).__name__, "", None
        kept = _compat.below_transforms(leaf).detach() if self._check == "bitwise" else None
        return tree.describe(leaf), str(leaf.device), kept

    def _compare_bits(self, path: str, old: Tensor, new: Tensor) -> None:
        if old.shape != new.shape:
            return  # mapped over in another way
        if old.layout == torch.sparse_coo:
            old, new = old.to_dense(), new.to_dense()
        same = (old == new) | ((old != old) & (new != new))
        if not bool(same.all()):
            place = tuple(int(index) for index in (~same).nonzero()[0])
            self._refuse(path, f"{old[place].item()!r} at {place}", f"{new[place].item()!r}")

    def _refuse(self, path: str, old: str, new: str) -> None:
        raise RematError(
            f"remat: the result{f' {path!r}' if path else ''} was {old} at first and {new} when it was recomputed; the "
            "function must compute the same both times, and not depend on state that changes in between"
        )
