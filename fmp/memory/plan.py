"""`fmp.memory.plan`: how many bytes a training run needs on each device, and what for."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fmp import tree
from fmp.dtypes import parse_dtype, short_name
from fmp.memory import accounting
from fmp.memory.accounting import Amount, Moments, counted
from fmp.memory.activations import Transformer, remat_name
from fmp.memory.checks import amount, parameter_count, whole
from fmp.memory.measured import Timeline
from fmp.memory.model_sizes import ModelSizes, model_sizes
from fmp.memory.planned import Plan
from fmp.memory.rehearsal import rehearse
from fmp.memory.units import unit_bytes
from fmp.module import Model
from fmp.optim import GradientTransformation
from fmp.patterns import matches
from fmp.policy import NORM_PATTERNS, Policy, opt_level

Tree = Any
Dtype = torch.dtype | str

# From which ZeRO stage on each device has its share only.
_SHARDED_FROM = {"masters": 1, "moments": 1, "average": 1, "gradients": 2, "accumulators": 2, "params": 3, "compute": 3}
_BYTES = (torch.int8, torch.uint8)
_LEVELS = ("O0", "O1", "O2", "O3")


def plan(
    model: Any,
    optimizer: str | GradientTransformation | None = "adamw",
    policy: Policy | str | None = None,
    *,
    gradients: Dtype | None = "compute",
    accumulate: int = 1,
    moments: Dtype | tuple[Dtype, Dtype] | None = None,
    average: bool = False,
    weight_bits: float | None = None,
    activations: float | Transformer | None = None,
    remat: bool | str = False,
    zero: int = 0,
    devices: int = 1,
    unit: str = "GB",
    measure: bool = False,
    loss_fn: Callable[..., Any] | None = None,
    batch: Tree = None,
) -> Plan:
    """Counts the bytes that a training run needs on each device, by kind.

    Nothing is allocated. Parameters, masters and moments are those that `fmp.train_step` would make, counted by making
    them without data. With N devices and ZeRO, each has its share of

        stage 1   masters, moments, average             of what Adam needs at O2: 4 + 12 / N bytes a number
        stage 2   gradients and accumulators, too       2 + 14 / N
        stage 3   params and compute copies, too        16 / N

    Args:
        model: A number of parameters, also as text such as `"7B"` or `"350M"`; an `nn.Module` (also on the meta
            device), an `fmp.Model`, or a tree of tensors, shapes or numbers. A weight that a module ties counts once;
            one that requires no grad as a frozen one. Of a tree each leaf counts, as `init` of a step copies each; if
            nothing is trained, shared ones count once.
        optimizer: A name: adam, adamw, lamb, lion, adafactor, rmsprop, sgd, sgd_momentum, adam8bit, adamw8bit; or an
            optimizer. None trains nothing: there are the parameters alone.
        policy: A policy, its string form, or an opt level, `"O0"` to `"O3"`, with float16 as half; None leaves the
            parameters as they are, a number of them in float32. With a module and a level, its normalization layers
            are kept in float32 as by `fmp.opt_level(level, keep_full=module)`; of a number, nothing is.
        gradients: The floating-point dtype of the gradients; `"compute"` for the one that the backward pass makes, None
            to leave them out.
        accumulate: The number of microbatches; from two on, their gradients are summed in float32.
        moments: The dtype of the optimizer's state, a floating-point one or one of 8 bits, or a pair for the first and
            second moment; None for its own. State that is not of floating-point numbers keeps its own.
        average: Whether a moving average of the parameters is kept, in float32, as `fmp.train_step(..., ema=)` does.
        weight_bits: The bits of a stored weight, where they are compressed and not trained: about 11 for DF11.
        activations: What the forward pass keeps, on each device: bytes, or the sizes of a transformer.
        remat: What the backward pass of the transformer recomputes: `"selective"`, or `"full"` or True.
        zero: The ZeRO stage, 0 to 3.
        devices: How many devices share the state.
        unit: What the table shows: `"GB"`, 10^9 bytes, or `"GiB"`, 2^30.
        measure: Whether to run a step on fake tensors, too, by `fmp.memory.measure_step`. Activations are then those
            that were measured, unless given. It runs on one device, with gradients and moments as the step makes them:
            the row of the measured peak says so where something else is planned.
        loss_fn: What to measure, as for `fmp.train_step`.
        batch: The batch that it takes.

    Returns:
        The plan.

    Raises:
        ValueError: If an argument is out of range or unknown, or two do not go together.
        TypeError: If one has a wrong type.

    References:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020,
        arXiv:1910.02054; Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740.

    Example:
        >>> print(plan(3.5e9, "adamw", "O2"))
        3,500,000,000 parameters, adamw, O2; on each device
        kind          GB  bytes a number  counted
        params      7.00           2.000  f16
        masters    14.00           4.000  f32
        gradients   7.00           2.000  f16
        moments    28.00           8.000  f32
        total      56.00          16.000
        not counted: activations; ...
        >>> [round(plan(7.5e9, "adam", "O2", zero=stage, devices=64).total / 1e9, 1) for stage in range(4)]
        [120.0, 31.4, 16.6, 1.9]
    """
    accumulate, devices, zero = whole("accumulate", accumulate, 1), whole("devices", devices, 1), whole("zero", zero)
    if zero > 3:
        raise ValueError(f"zero must be a ZeRO stage, 0 to 3, got {zero}")
    if not isinstance(measure, bool):
        raise TypeError(f"measure must be True or False, got {measure!r}")
    if not measure and (loss_fn is not None or batch is not None):
        raise ValueError("loss_fn and batch are for a measurement: pass measure=True, or leave them out")
    unit_bytes(unit)
    remat = remat_name(remat)
    if isinstance(model, str):
        model = parameter_count("model", model)
    rules = _policy(policy, model)
    sizes = model_sizes(model, trains=optimizer is not None)
    _check_kept(rules, sizes)
    if weight_bits is not None:
        weight_bits = amount("weight_bits", weight_bits)
        if optimizer is not None or not weight_bits:
            raise ValueError("weight_bits, above 0, is for compressed weights, never trained; pass optimizer=None")

    params, masters, full = accounting.params_and_masters(sizes, rules)
    frozen = rules.cast_to_param(sizes.frozen)
    used, copies = accounting.compute_copies(params, rules)
    amounts = {
        "params": counted((params, frozen)) if weight_bits is None else _compressed(sizes, weight_bits),
        "compute": counted((copies, accounting.compute_copies(frozen, rules)[1]), "at most" if rules.op_rules else ""),
        "masters": counted(masters, _form_note(rules)),
        "gradients": _gradients(used, gradients),
        "accumulators": counted(accounting.in_dtype(used, None)) if accumulate > 1 else Amount(0),
        "average": counted(accounting.in_dtype(full, None)) if average else Amount(0),
        "buffers": counted(rules.cast_to_param(sizes.buffers)),
        "moments": Amount(0),
        "other": Amount(0),
    }
    if optimizer is not None:
        kept = accounting.optimizer_state(optimizer, full, _moments(moments), sizes.is_number)
        amounts["moments"], amounts["other"] = kept
    timeline = None
    if measure:
        tx = None if optimizer is None or optimizer in accounting.EIGHT_BIT else accounting.transformation(optimizer)
        timeline = rehearse(model, tx, rules, accumulate=accumulate, average=average, loss_fn=loss_fn, batch=batch)
    amounts["activations"] = _activations(activations, remat, rules, timeline)

    return Plan(
        **{kind: _share(kind, each.nbytes, zero, devices) for kind, each in amounts.items()},
        numbers=sizes.numbers,
        optimizer=_named_optimizer(optimizer),
        policy=_named_policy(policy),
        zero=zero,
        devices=devices,
        unit=unit,
        texts={
            **{kind: _text(kind, each.text, zero, devices) for kind, each in amounts.items()},
            "measured peak": _measured_text(gradients, moments, activations, zero, devices),
        },
        missing=_missing(amounts, optimizer, zero, remat),
        timeline=timeline,
    )


def _policy(policy: Policy | str | None, model: Any) -> Policy:
    if isinstance(policy, str):
        if policy not in _LEVELS:
            return _parsed_policy(policy)
        named = policy == "O2" and isinstance(model, nn.Module | Model)
        return opt_level(policy, keep_full=model) if named else opt_level(policy)
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy must be a Policy, its string form, an opt level or None, got {policy!r}")
    return Policy(None, None, None) if policy is None else policy


def _parsed_policy(policy: str) -> Policy:
    try:
        return Policy.parse(policy)
    except (ValueError, TypeError) as error:
        if "=" in policy:
            raise
        levels = ", ".join(_LEVELS)
        raise type(error)(f"policy {policy!r} is neither an opt level, {levels}, nor a string form: {error}") from error


def _check_kept(policy: Policy, sizes: ModelSizes) -> None:
    """Refuses names to keep in float32 of which no leaf has one, as the first state of a step does."""
    given = [name for name in policy.keep_full if name not in NORM_PATTERNS]
    paths = [] if sizes.is_number else [*tree.paths(sizes.trained), *tree.paths(sizes.buffers)]
    if given and paths and not any(matches(path, given) for path in paths):
        shown = ", ".join(map(repr, paths[:5]))
        raise ValueError(f"policy: its keep_full names {given[:5]}, but no leaf matches; the paths are {shown}, ...")


def _compressed(sizes: ModelSizes, bits: float) -> Amount:
    return Amount(-int(-sizes.numbers * bits // 8), f"{bits:g} bits a number")


def _form_note(policy: Policy) -> str:
    return "" if policy.master_form in (None, "f32") else f"by the form {policy.master_form}"


def _gradients(used: Tree, dtype: Dtype | None) -> Amount:
    if dtype is None:
        return Amount(0)
    if dtype == "compute":
        return counted(used)
    return counted(accounting.in_dtype(used, _dtype("gradients", dtype)))


def _moments(dtype: Dtype | tuple[Dtype, Dtype] | None) -> Moments | None:
    if isinstance(dtype, tuple | list):
        if len(dtype) != 2:
            raise ValueError(f"moments must be a dtype or a pair of two, got {dtype!r}")
        return _dtype("moments", dtype[0], _BYTES), _dtype("moments", dtype[1], _BYTES)
    return None if dtype is None else _dtype("moments", dtype, _BYTES)


def _dtype(argument: str, dtype: Any, others: tuple[torch.dtype, ...] = ()) -> torch.dtype:
    try:
        found = parse_dtype(dtype)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{argument}: {error}") from error
    if not found.is_floating_point and found not in others:
        extra = "".join(f" or {short_name(other)}" for other in others)
        raise ValueError(f"{argument} must be of a floating-point dtype{extra}, got {short_name(found)}")
    return found


def _activations(given: float | Transformer | None, remat: str, policy: Policy, timeline: Timeline | None) -> Amount:
    if isinstance(given, Transformer):
        dtype = policy.compute_dtype or policy.param_dtype or torch.float32
        text = f"{short_name(dtype)}, by formula" + ("" if remat == "none" else f", {remat} recomputation")
        return Amount(given.activation_bytes(remat, dtype.itemsize), text)
    if remat != "none":
        raise ValueError(f"remat={remat!r} is about the activations of a transformer: activations=Transformer(...)")
    if given is None:
        return Amount(0) if timeline is None else Amount(max(timeline.live["activations"]), "as measured")
    return Amount(int(amount("activations", given, "a number of bytes, or a Transformer")), "as given")


def _share(kind: str, nbytes: int, zero: int, devices: int) -> int:
    return -(-nbytes // devices) if zero >= _SHARDED_FROM.get(kind, 4) else nbytes


def _text(kind: str, text: str, zero: int, devices: int) -> str:
    shared = devices > 1 and zero >= _SHARDED_FROM.get(kind, 4)
    return f"{text}, a share of 1/{devices}" if shared else text


def _measured_text(gradients: Any, moments: Any, activations: Any, zero: int, devices: int) -> str:
    """Says where the measured step is not the one that was planned."""
    notes = ["on one device" if devices > 1 and zero else "", "its own moments" if moments is not None else ""]
    notes += ["" if gradients == "compute" else "its own gradients", "" if activations is None else "its activations"]
    return ", ".join(["one step", *filter(None, notes)])


def _named_optimizer(optimizer: Any) -> str:
    return "nothing trained" if optimizer is None else optimizer if isinstance(optimizer, str) else "an optimizer"


def _named_policy(policy: Policy | str | None) -> str:
    if not isinstance(policy, Policy):
        return "no policy" if policy is None else policy
    names = {"params": policy.param_dtype, "compute": policy.compute_dtype}
    parts = [f"{name}={'none' if dtype is None else short_name(dtype)}" for name, dtype in names.items()]
    return " ".join([*parts, *([f"masters={policy.master_form}"] if policy.master_form else [])])


def _missing(amounts: Mapping[str, Amount], optimizer: Any, zero: int, remat: str) -> tuple[str, ...]:
    missing = [] if amounts["activations"].nbytes else ["activations"]
    if optimizer is not None:
        if not amounts["gradients"].nbytes:
            missing.append("gradients")
        missing.append("what unscaling and the update make on their way")
    if remat == "full":
        missing.append("the layer that is being recomputed")
    if zero:
        missing.append("buffers for communication" + (" and gathered parameters" if zero == 3 else ""))
    return (*missing, "workspaces, the allocator's rounding, the context of a GPU (0.3 to 2 GiB)")
