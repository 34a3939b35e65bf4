"""Recomputation where no transform is active: torch.utils.checkpoint, with what it leaves out.

It records the function as it runs and throws away what autograd saves; the backward pass runs the function again, up to
the last value that it needs (early stop). Missing there, and added here: function modes, random generators, the
tensors of modules that were swapped for the call, variables that a closure has seen change, and a check for changes in
place.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fmp import _compat
from fmp.ambient import Ambient, check_devices, random_state, set_random_state
from fmp.rematerialization.capture import Capture
from fmp.rematerialization.guards import DeterminismCheck, check_not_written, versions
from fmp.rematerialization.recording import Kept

# The devices whose random state `drawing_again` restores, in less time than torch.utils.checkpoint does.
_KNOWN = {"cpu", "cuda", "meta"}


class HooksRefused(Exception):
    """The function uses a transform of torch.func, which saved-tensor hooks cannot be around."""


def checkpointed(
    capture: Capture,
    preserve_rng_state: bool,
    determinism_check: DeterminismCheck,
    debug: bool,
    kept: Kept | None,
) -> Any:
    """Calls a function; autograd will recompute it.

    Args:
        capture: The function, its arguments and keyword arguments, as one value.
        preserve_rng_state: Whether the same random numbers are drawn again.
        determinism_check: What must be the same.
        debug: Whether an error shows the operators of both passes.
        kept: The values inside that are kept.

    Raises:
        HooksRefused: If the function cannot be recomputed in this way. What it has drawn until then is put back.
    """
    start = random_state(capture.tensors, capture.generators)
    ambient = Ambient(start if preserve_rng_state else None)
    before = versions(capture.tensors)
    # Autograd saves no inference tensors. They get no gradient, so that the recomputation can hold them itself.
    inference = {slot: tensor for slot, tensor in enumerate(capture.tensors) if tensor.is_inference()}
    is_first = True

    def run(*saved: Tensor) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            function, args, kwargs = capture.value
            with kept.recording() if kept else nullcontext(), capture.exclusive(), capture.cache():
                return function(*args, **kwargs)
        operands = _joined(saved, inference)
        is_mapped = _compat.transform_active() or _compat.gradients_are_batched()
        if kept is None and not is_mapped and ambient.is_here():
            with ambient.drawing_again():
                return capture.called(operands)
        with ExitStack() as stack:
            # A mapping that began after the call maps the pulling back, but not the recomputation.
            stack.enter_context(_compat.without_transforms())
            stack.enter_context(ambient.drawing_again())
            stack.enter_context(ambient.entered(ambient.seeds, operands))
            if kept:
                stack.enter_context(kept.again())
            return capture.called(operands)

    try:
        result = checkpoint(
            run,
            *[tensor for slot, tensor in enumerate(capture.tensors) if slot not in inference],
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state and not {tensor.device.type for tensor in capture.tensors} <= _KNOWN,
            determinism_check=determinism_check,
            debug=debug,
        )
    except RuntimeError as error:
        if _compat.refuses_saved_tensor_hooks(error):
            set_random_state(start)
            ambient.rewind()
            raise HooksRefused from error
        raise
    if preserve_rng_state:
        check_devices(start)
    capture.check_modules(capture.tensors)
    check_not_written(before, capture.tensors, capture)
    if ambient.seeds:
        ambient.settle()
    capture.snapshot.settle()
    capture.forget()
    return result


def _joined(saved: Sequence[Tensor], inference: Mapping[int, Tensor]) -> Sequence[Tensor]:
    """Puts inference tensors back into their slots."""
    if not inference:
        return saved
    others = iter(saved)
    return [inference[slot] if slot in inference else next(others) for slot in range(len(saved) + len(inference))]
