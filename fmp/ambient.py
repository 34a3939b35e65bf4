"""What surrounds a call and decides what it computes: taken down at the call, restored when the call is made again.

function modes      fmp's own are forked: a copy starts where the original stood. Others are entered as they are.
torch.autocast      with its cache off, which would hold on to casts of another pass
default dtype       the default device is a function mode
part of the batch   for which seeded numbers are drawn
random state        of the CPU, of the CUDA devices in use, and of the generators that the call can reach
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fmp import _compat, random
from fmp.dropout import SeededRandomness
from fmp.errors import RematError
from fmp.policy.caster import Caster
from fmp.policy.op_rules import OpRules

# torch waits for a generator with Python's lock in its hand. If a garbage collection lets go of that lock while another
# thread reads the state, both wait for ever; whoever waits here does so without it.
_generators = threading.RLock()


class _Casting(NamedTuple):
    """A caster, as it stood."""

    rules: OpRules
    low: torch.dtype
    covers: int
    suspended: bool


class _Seeded(NamedTuple):
    """Seeded randomness, as it stood."""

    seed: Tensor
    calls: int


class RandomState(NamedTuple):
    """The states of random generators."""

    cpu: Tensor
    cuda: tuple[tuple[int, Tensor], ...]
    generators: tuple[tuple[torch.Generator, Tensor], ...]
    is_cuda_in_use: bool


class Ambient:
    """What surrounds the caller.

    Args:
        random_state: The state of the random generators, where numbers shall be drawn again.

    Attributes:
        seeds: The seeds of the modes around. They may be wrapped by a transform, so they are operands like any tensor.
    """

    def __init__(self, random_state: RandomState | None = None):
        self._originals = [mode for mode in _compat.function_modes() if isinstance(mode, SeededRandomness)]
        self._modes = [_as_it_stands(mode) for mode in _compat.function_modes()]
        self._autocast = {device: torch.get_autocast_dtype(device) for device in _compat.autocast_devices()}
        self._default_dtype = torch.get_default_dtype()
        self._random = random_state
        self._part = random.current_part()
        self.seeds = [state.seed for state in self._modes if isinstance(state, _Seeded)]

    @contextmanager
    def entered(
        self,
        seeds: Sequence[Tensor],
        operands: Sequence[Tensor] = (),
        outermost: TorchFunctionMode | None = None,
    ) -> Iterator[list[SeededRandomness]]:
        """Restores all but the random state, whatever surrounds the caller now.

        Args:
            seeds: What to use in place of `seeds`.
            operands: Tensors that exist before and after; a caster casts each once.
            outermost: A mode to put around all others.

        Yields:
            The copies of the seeded modes.
        """
        with ExitStack() as stack:
            for device in {*self._autocast, *_compat.autocast_devices()}:
                dtype, on = self._autocast.get(device), device in self._autocast
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=False))
            if torch.get_default_dtype() != self._default_dtype:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._default_dtype)
            if random.current_part() != self._part:
                stack.enter_context(random.part_of_batch(self._part))
            stack.enter_context(_compat.replaced_function_modes())
            if outermost is not None:
                _compat.push_function_mode(outermost)
            remaining = iter(seeds)
            forks: list[SeededRandomness] = []
            for state in self._modes:
                if isinstance(state, _Casting):
                    mode: TorchFunctionMode = _fork(state, operands)
                    if state.suspended:
                        stack.enter_context(torch.autocast("cpu", enabled=False))
                elif isinstance(state, _Seeded):
                    mode = SeededRandomness(next(remaining), state.calls)
                    forks.append(mode)
                else:
                    mode = state
                _compat.push_function_mode(mode)
            yield forks

    def is_here(self) -> bool:
        """Says whether `entered` would change nothing."""
        return (
            not (self._modes or self._autocast or _compat.function_modes() or _compat.autocast_devices())
            and torch.get_default_dtype() == self._default_dtype
            and random.current_part() == self._part
        )

    @contextmanager
    def drawing_again(self) -> Iterator[None]:
        """Restores the random state, and puts back afterwards what it was."""
        if self._random is None:
            yield
            return
        state = self._random
        before = _read([device for device, _ in state.cuda], [generator for generator, _ in state.generators])
        set_random_state(state)
        try:
            yield
        finally:
            set_random_state(before)

    def drawn(self, forks: Sequence[SeededRandomness]) -> list[int]:
        """Counts the draws that the copies have made."""
        states = [state for state in self._modes if isinstance(state, _Seeded)]
        return [fork.calls - state.calls for state, fork in zip(states, forks, strict=True)]

    def rewind(self) -> None:
        """Takes the modes around back to where they stood at the call."""
        states = [state for state in self._modes if isinstance(state, _Seeded)]
        for mode, state in zip(self._originals, states, strict=True):
            mode.calls = state.calls

    def settle(self, draws: Sequence[int] = ()) -> None:
        """Lets the modes around go on after the draws that their copies made, and lets go of them."""
        for mode, count in zip(self._originals, draws, strict=False):
            mode.calls += count
        self._originals = []


def random_state(tensors: Iterable[Tensor] = (), generators: Iterable[torch.Generator] = ()) -> RandomState:
    """Reads the state of the CPU's generator, of those of the CUDA devices in use, and of the given ones."""
    devices = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
    if torch.cuda.is_initialized():
        devices.add(torch.cuda.current_device())
    return _read(sorted(devices), generators)


def check_devices(state: RandomState) -> None:
    """Checks that no device has come into use since `random_state` read the state of those in use.

    Raises:
        RematError: If CUDA has been initialized since.
    """
    if torch.cuda.is_initialized() and not state.is_cuda_in_use:
        message = "the function has initialized CUDA, so its random numbers there cannot be drawn again"
        raise RematError(f"remat: {message}; call torch.cuda.init() before, or pass preserve_rng_state=False")


def set_random_state(state: RandomState) -> None:
    """Sets the generators to the state that `random_state` has read."""
    with _generators:
        torch.set_rng_state(state.cpu)
        for device, numbers in state.cuda:
            torch.cuda.set_rng_state(numbers, device)
        for generator, numbers in state.generators:
            generator.set_state(numbers)


def _read(devices: Iterable[int], generators: Iterable[torch.Generator]) -> RandomState:
    with _generators:
        return RandomState(
            torch.get_rng_state(),
            tuple([(device, torch.cuda.get_rng_state(device)) for device in devices]),
            tuple([(generator, generator.get_state()) for generator in generators]),
            torch.cuda.is_initialized(),
        )


def _as_it_stands(mode: TorchFunctionMode) -> Any:
    if isinstance(mode, Caster):
        return _Casting(mode.rules, mode.low, mode.covers, mode.is_suspended())
    return _Seeded(mode.seed, mode.calls) if isinstance(mode, SeededRandomness) else mode


def _fork(state: _Casting, operands: Sequence[Tensor]) -> Caster:
    caster = Caster(state.rules, state.low, list(operands))
    caster.covers = state.covers
    return caster
