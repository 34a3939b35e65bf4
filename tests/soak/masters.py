"""The update of a step: clipping, the optimizer, the form of the masters and the moving average, against float64."""

from typing import Any

import torch

import fmp
from fmp import tree
from tests.soak.optimizers import ORACLES
from tests.soak.program import Program, of_groups
from tests.soak.rounding import Rounding, excess

Tensor = torch.Tensor
Tree = Any

UNIT = 2.0**-24
# How far a number lies from what is kept of it: relative, and absolute among the subnormal ones of float16.
_FORMS = {
    ("f32", "bf16"): (0.0, 0.0),
    ("f32", "f16"): (0.0, 0.0),
    ("remainder", "bf16"): (0.0, 0.0),
    ("kahan", "bf16"): (2.0**-16, 0.0),  # two numbers of 8 digits and the sign of the second
    ("kahan", "f16"): (2.0**-22, 2.0**-25),  # of 11 digits
    ("stochastic", "bf16"): (2.0**-7, 0.0),  # either neighbor
    ("stochastic", "f16"): (2.0**-10, 2.0**-24),
    (False, "bf16"): (2.0**-8, 0.0),  # the nearer one
    (False, "f16"): (2.0**-11, 2.0**-25),
}


def full(param: Tensor, rest: Tensor | None, form: str | bool) -> Tensor:
    """The number that a parameter and what is kept beside it stand for, in float64."""
    if rest is None:
        return param.double()
    match form:
        case "f32":
            return rest.double()
        case "remainder":
            bits = (param.view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
            return bits.view(torch.float32).double()
        case "kahan":
            return param.double() + rest.double()
    raise AssertionError(f"{form} keeps nothing beside a parameter")


def kept(program: Program, param: Tensor, size: Tensor) -> Tensor:
    """How far a number may lie from what is kept of it, beside a parameter and its rest."""
    if param.dtype == torch.float32:
        return torch.zeros_like(size)
    relative, absolute = _FORMS[program.master, program.half]
    return relative * size.abs() * (1.0 + 2.0**-7) + absolute


def check_update(
    program: Program, state: fmp.TrainState, new: fmp.TrainState, metrics: Any, grads: Tree, slots: dict[str, Any]
) -> None:
    """Checks the next parameters, masters and averages of all groups that are not skipped.

    Args:
        program: The program.
        state: The state before the step.
        new: The state after it.
        metrics: What the step reports.
        grads: The gradients, unscaled, before they are clipped.
        slots: What the oracles keep, by group and sample; changed.

    Raises:
        AssertionError: If something is off by more than rounding.
    """
    skipped = of_groups(program, metrics.skipped)
    for group, row in zip(program.groups, program.optimizers, strict=True):
        if bool(skipped[group]):
            continue
        old, now, gradients = (_of(program, value, group) for value in (state, new, grads))
        _check_group(program, row, group, old, now, gradients["grads"], slots.setdefault(group, {}))


def _of(program: Program, value: Any, group: str) -> dict[str, dict[str, Any]]:
    """The leaves of one group by path: of a state's parts, or of gradients."""
    if not isinstance(value, fmp.TrainState):
        return {"grads": dict(tree.items(of_groups(program, value)[group]))}
    parts = {"params": value.params, "master": value.master, "ema": value.ema}
    return {
        name: {} if part is None else dict(tree.items(of_groups(program, part)[group])) for name, part in parts.items()
    }


def _check_group(
    program: Program,
    row: str,
    group: str,
    old: dict[str, dict[str, Any]],
    new: dict[str, dict[str, Any]],
    grads: dict[str, Tensor],
    slots: dict[Any, dict[str, Any]],
) -> None:
    oracle = ORACLES[row]
    before = {path: full(param, old["master"].get(path), program.master) for path, param in old["params"].items()}
    after = {path: full(param, new["master"].get(path), program.master) for path, param in new["params"].items()}
    # A sample that is asked for the first time has the steps before to make up for.
    history = slots.setdefault("history", {"steps": []})["steps"]
    history.append((before, {path: grad.double() for path, grad in grads.items()}))

    def update(slot: dict[str, Any], count: int, values: dict[str, Tensor], gs: dict[str, Tensor]) -> dict[str, Tensor]:
        norm = torch.stack([g.square().sum() for g in gs.values()]).sum().sqrt()
        for bound in (program.clip, oracle.max_norm):
            if bound is not None and float(norm) > bound:
                gs = {path: g * (bound / norm) for path, g in gs.items()}
                norm = norm * (bound / norm)
        gs = {path: g * 1.0 for path, g in gs.items()}  # which rounds once in a sample
        return {
            path: oracle.leaf(count, path, value, gs[path], slot.setdefault(path, {})) for path, value in values.items()
        }

    def replay(slot: dict[str, Any]) -> dict[str, Tensor]:
        while slot.setdefault("count", 0) < len(history):
            values, gs = history[slot["count"]]
            slot["last"] = update(slot.setdefault("leaves", {}), slot["count"], values, gs)
            slot["count"] += 1
        return slot["last"]

    exact = replay(slots.setdefault("exact", {}))

    def sample(index: int) -> dict[str, Tensor]:
        with torch.no_grad(), Rounding(torch.float32, index):
            return replay(slots.setdefault(index, {}))

    def floor(path: str) -> Any:
        param = new["params"][path]
        change = (exact[path] - before[path]).abs()
        size = torch.maximum(before[path].abs(), exact[path].abs())
        allowed = 4.0 * UNIT * (size + change) + oracle.slack * change + 1e-37
        return allowed + kept(program, param, size + allowed)

    problem = excess(after, exact, sample, floor=floor)
    assert problem is None, f"{row}: {problem}"
    _check_parameters(program, new)
    if program.ema is not None:
        _check_average(program, row, group, old, new, before, exact, sample)


def _check_parameters(program: Program, new: dict[str, dict[str, Any]]) -> None:
    """Parameters are the rounded masters: to nearest, or half up with a remainder."""
    for path, param in new["params"].items():
        rest = new["master"].get(path)
        if rest is None:
            continue
        value = full(param, rest, program.master)
        if program.master == "remainder":
            bits = value.float().view(torch.int32)
            expected = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        else:
            expected = value.to(param.dtype)
        assert torch.equal(param, expected), f"{path} is not its master rounded"


def _check_average(
    program: Program,
    row: str,
    group: str,
    old: dict[str, dict[str, Any]],
    new: dict[str, dict[str, Any]],
    before: dict[str, Tensor],
    exact: dict[str, Tensor],
    sample: Any,
) -> None:
    """The average is of the masters before they are rounded; without masters, of the parameters."""
    decay = program.ema
    assert decay is not None

    def averaged(values: dict[str, Tensor]) -> dict[str, Tensor]:
        if program.master is False:
            values = {path: param.double() for path, param in new["params"].items()}
        return {path: decay * old["ema"][path].double() + (1.0 - decay) * value for path, value in values.items()}

    means = averaged(exact)
    sizes = {path: torch.maximum(old["ema"][path].abs(), value.abs()) for path, value in exact.items()}
    changes = {path: (value - before[path]).abs() for path, value in exact.items()}

    def allowed(path: str) -> Any:
        return 4.0 * UNIT * sizes[path] + ORACLES[row].slack * changes[path] + 1e-37

    problem = excess(new["ema"], means, lambda index: averaged(sample(index)), floor=allowed)
    assert problem is None, f"the average of {row} {group}: {problem}"
