"""Runs a program and compares each step with float64, and with what must hold bit for bit."""

import tempfile
from pathlib import Path
from typing import Any

import torch

import fmp
from fmp import tree
from tests.bits import differing, same_bits, snapshot
from tests.soak import masters
from tests.soak.gradients import check_gradients
from tests.soak.program import Program, of_groups, of_losses

Tree = Any


def check(program: Program) -> None:
    """Runs a program in all its forms.

    Each step is compared with float64 from the numbers that it really starts from: the gradients from the parameters as
    they are rounded, and the update from the gradients as they are. So no error is carried from step to step, and a
    tolerance is one of a single rounding (see `tests.soak.rounding`).

    Raises:
        AssertionError: If anything is not as it should be.
    """
    step, probe = program.step(), program.step(probe=True)
    final = _with_oracle(program, step, probe)
    if final is None or program.around == "compile":  # to compile all of the others takes a minute
        return
    again = program.step(donate=program.donate and program.around == "plain")
    _same("the same program again, perhaps donated", _run(program, again), final)
    _same("resumed from a checkpoint", _run(program, step, resumed=True), final)
    if program.remat != "none" and not program.is_tied:
        _same("without remat", _run(program, program.step(remat="none")), final)


def _with_oracle(program: Program, step: Any, probe: Any) -> fmp.TrainState | None:
    """Makes all steps next to the oracle; returns None if numbers overflow and nothing skips."""
    run, look = _around(program, step), _around(program, probe)
    state = _first(program, step)
    empty = _first(program, probe).opt_state
    slots: list[dict[str, Any]] = [{} for _ in range(program.members)]
    scalers = [_Scalers(program) for _ in range(program.members)]
    seeds: list[dict[int, int]] = [{} for _ in range(program.members)]
    for member in range(program.members):
        _check_start(program, _part(program, state, member), program.params(member))
    for count in range(program.steps):
        batch = _stacked(program, [program.batch(count, member) for member in range(program.members)])
        before = snapshot((state, batch))
        seen, seen_metrics = look(tree.replace(state, opt_state=empty), batch)
        new, metrics = run(state, batch)
        _same("the arguments of a step", (state, batch), before)
        _same("the metrics", metrics.loss, seen_metrics.loss)
        for member in range(program.members):
            one = _Member(
                program,
                member,
                *(_part(program, value, member) for value in (state, new, metrics, batch, seen.opt_state)),
            )
            scalers[member].check(one)
            one.check_skips()
            one.check_seeds(seeds[member])
            check_gradients(program, one.state, one.batch, one.metrics, one.grads, is_poisoned=one.is_poisoned(count))
            if not one.is_finite():
                return None
            masters.check_update(program, one.state, one.new, one.metrics, one.grads, slots[member])
        state = new
    return state


class _Member:
    """One step of one member: what it started from, and what came out."""

    def __init__(self, program: Program, index: int, state: Any, new: Any, metrics: Any, batch: Any, grads: Any):
        self.program, self.index = program, index
        self.state, self.new, self.metrics, self.batch, self.grads = state, new, metrics, batch, grads

    def is_poisoned(self, count: int) -> bool:
        return self.program.poison == (count, self.index)

    def is_finite(self) -> bool:
        """Whether the next state is one to go on from; what does not skip may overflow."""
        return all(
            bool(leaf.isfinite().all())
            for leaf in tree.leaves((self.new.params, self.new.master, self.new.opt_state))
            if leaf is not None and leaf.is_floating_point()
        )

    def check_seeds(self, seen: dict[int, int]) -> None:
        """Each loss of each microbatch of each step has a seed of its own; a step after a skipped one has the same."""
        aux = of_losses(self.program, self.metrics.aux)
        drawn = [int(seed) for value in aux.values() for seed in value["seed"].reshape(-1)]
        _equal("seeds of a step", len(set(drawn)), len(self.program.losses) * self.program.accumulate)
        step = int(self.state.step)
        assert all(seen.setdefault(seed, step) == step for seed in drawn), "two steps have the same seed"

    def check_skips(self) -> None:
        """A group is skipped if a loss that uses it is not finite, and then keeps every bit."""
        program, state, new = self.program, self.state, self.new
        finite = of_losses(program, self.metrics.grads_finite)
        skips = program.scaler is not None
        skipped = of_groups(program, self.metrics.skipped)
        for group in program.groups:
            using = [name for name, groups in program.losses.items() if group in ("", *groups)]
            expected = skips and not all(bool(finite[name]) for name in using)
            _equal(f"skipped {group}", bool(skipped[group]), expected)
            counts = [int(of_groups(program, each.skip_count)[group]) for each in (state, new)]
            _equal(f"skip_count {group}", counts[1], counts[0] + expected)
            if expected:
                for part in ("params", "master", "opt_state", "ema"):
                    old, now = (getattr(each, part) for each in (state, new))
                    if old is not None:
                        _same(f"{part} {group} of a skipped step", *(of_groups(program, x)[group] for x in (now, old)))
        is_step = not all(bool(value) for value in skipped.values())
        _equal("step", int(new.step), int(state.step) + is_step)
        if skips and not any(bool(value) for value in finite.values()):
            _same("buffers of a skipped step", new.buffers, state.buffers)
        _same("seed", new.seed, state.seed)


class _Scalers:
    """The loss scales in plain Python: growth on the n-th finite step in a row, backoff on an overflow."""

    def __init__(self, program: Program):
        self.program = program
        start = program.scaler[0] if isinstance(program.scaler, tuple) else program.scaler or 1.0
        self.scales, self.counts = dict.fromkeys(program.losses, start), dict.fromkeys(program.losses, 0)

    def check(self, one: _Member) -> None:
        used, finite = (of_losses(self.program, part) for part in (one.metrics.loss_scale, one.metrics.grads_finite))
        for name in self.program.losses:
            _equal(f"loss_scale {name}", float(used[name]), self.scales[name])
            if isinstance(self.program.scaler, tuple):
                self._adjust(name, bool(finite[name]))
                scaler = of_losses(self.program, one.new.loss_scale)[name]
                found = float(scaler.loss_scale), int(scaler.growth_count)
                _equal(f"next loss_scale {name}", found, (self.scales[name], self.counts[name]))

    def _adjust(self, name: str, finite: bool) -> None:
        _, growth, backoff, interval = self.program.scaler  # type: ignore[misc] - it is a tuple
        if not finite:
            self.scales[name], self.counts[name] = max(_f32(self.scales[name] * _f32(backoff)), 1.0), 0
        elif self.counts[name] + 1 >= interval:
            self.scales[name], self.counts[name] = min(_f32(self.scales[name] * _f32(growth)), 2.0**24), 0
        else:
            self.counts[name] += 1


def _check_start(program: Program, state: fmp.TrainState, params: Tree) -> None:
    """Masters and averages start from the parameters before these are rounded."""
    for path, value in tree.items(params):
        parts = [None if part is None else dict(tree.items(part)) for part in (state.params, state.master, state.ema)]
        param, rest, mean = (None if part is None else part[path] for part in parts)
        assert param is not None
        # A remainder rounds half up; with Kahan's sum, the parameter is the one nearest to the sum of both.
        if program.master not in ("remainder", "kahan"):
            _same(f"{path} at the start", param, value.to(param.dtype))
        error = (masters.full(param, rest, program.master) - value.double()).abs()
        allowed = masters.kept(program, param, value) + (0.0 if param.dtype == torch.float32 else 1e-40)
        assert bool((error <= allowed).all()), f"{path} starts {float(error.max())} away from what was given"
        if mean is not None:
            _same(f"the average of {path} at the start", mean, value)


def _run(program: Program, step: Any, *, resumed: bool = False) -> fmp.TrainState:
    """Makes all steps, half of them after a restart from a file."""
    run, state = _around(program, step), _first(program, step)
    for count in range(program.steps):
        if resumed and count == program.steps // 2:
            with tempfile.TemporaryDirectory() as folder:
                fmp.checkpoint.save(state, Path(folder) / "state")
                state = fmp.checkpoint.load(_first(program, step), Path(folder) / "state")
        batch = _stacked(program, [program.batch(count, member) for member in range(program.members)])
        state, _ = run(state, batch)
    return state


def _around(program: Program, step: Any) -> Any:
    if program.around == "vmap":
        return torch.func.vmap(step)
    return torch.compile(step, backend="aot_eager", fullgraph=True) if program.around == "compile" else step


def _first(program: Program, step: Any) -> fmp.TrainState:
    states = [
        step.init(program.params(member), buffers=program.buffers(), seed=program.seed + member)
        for member in range(program.members)
    ]
    return _stacked(program, states)


def _stacked(program: Program, values: list[Any]) -> Any:
    if program.around != "vmap":
        return values[0]
    return tree.map(lambda *leaves: None if leaves[0] is None else torch.stack(leaves), *values)


def _part(program: Program, value: Any, member: int) -> Any:
    if program.around != "vmap":
        return value
    return tree.map(lambda leaf: leaf[member] if isinstance(leaf, torch.Tensor) else leaf, value)


def _f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def _equal(what: str, found: Any, expected: Any) -> None:
    assert found == expected, f"{what}: found {found}, expected {expected}"


def _same(what: str, found: Tree, expected: Tree) -> None:
    if not same_bits(found, expected):
        different = differing(found, expected) if tree.structure(found) == tree.structure(expected) else "structure"
        raise AssertionError(f"{what}: other bits in {different}")
