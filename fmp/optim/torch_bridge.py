"""from_torch: any `torch.optim.Optimizer` class as a pair of pure functions."""

from collections.abc import Sequence
from typing import Any

import torch

from fmp import _compat, tree
from fmp.dtypes import full_precision, is_castable
from fmp.optim import checks, torch_steps
from fmp.optim.base import GradientTransformation, scheduled, update_leaves, zero_count
from fmp.optim.torch_steps import Maker
from fmp.tree.wholes import check_whole

Tree = Any

# Classes of which each entry depends on no other, so that they may work on any part of a tensor. A subclass may differ.
_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


@tree.dataclass
class FromTorchState:
    """The state of `from_torch`.

    Attributes:
        count: i32[], the number of updates made; what a schedule is asked at.
        ages: i32[] a parameter, the number of updates that it has had; None where the class treats its first like any
            other, so that nothing depends on it.
        slots: By name (`exp_avg`, `step`, ...), what torch keeps for each parameter, with torch's shapes and in float32
            or wider. A 0-dim parameter is shown to the class as [1].
        numbers: The names of the slots that are Python numbers to the class; they are 0-dim tensors here.
    """

    count: torch.Tensor
    ages: Tree
    slots: dict[str, Tree]
    numbers: tuple[str, ...] = tree.static()


def from_torch(optimizer_class: type[torch.optim.Optimizer], **kwargs: Any) -> GradientTransformation:
    """Makes a pure optimizer of a class that follows the protocol of `torch.optim.Optimizer`.

    Each update builds the optimizer on copies of the parameters, gives it gradients and state, lets it step, and reads
    back what has changed:

        update = new - p

    On a CPU, outside of transforms, the steps are torch's own, bit for bit. On other devices, under `torch.func`,
    autograd and `torch.compile`, the class is asked for its `capturable` and `differentiable` forms, and step counts
    are computed with in float64, which gives the same up to rounding.

    `p + update` is the new parameter bit for bit where that lies between half and twice the old one (Sterbenz 1974).
    Else it is off by at most one spacing of floats, at the larger of the two.

    Every parameter is in one group, with one set of options; `partition` gives groups. A class that remembers anything
    outside of `self.state[param]`, in its groups or in attributes, is refused by the first step that changes it. Other
    objects, globals and random generators are not seen, and are no part of the state.

    Args:
        optimizer_class: The class. Adafactor looks at numbers on the host, so that it runs neither under vmap nor in
            fullgraph compile, and it divides by zero for a parameter without entries; ASGD and Rprop cannot be
            differentiated, nor can RAdam in its first five steps.
        **kwargs: Its options. `lr` may be a number, a 0-dim tensor, or a schedule, which is asked at 0 for the first
            update. Other options must be numbers under `torch.func` and `torch.compile`: `inject_hyperparams` leaves
            those that it is told by `static`. `foreach`, `fused`, `capturable` and `differentiable` are chosen here
            unless they are given.

    Returns:
        The optimizer; its state is a `FromTorchState`.

    Raises:
        TypeError: If `optimizer_class` is not a class of optimizers, does not take an option, or is one that cannot
            be a pure function of gradients (LBFGS, SparseAdam). When called: if a parameter is a `LocalShard`, unless
            the class is one of torch's that work on each entry by itself; if the state of a parameter holds other
            things than tensors and numbers, a class without `differentiable` is to be differentiated, or an option
            other than `lr` is a tensor while something is traced.
        ValueError: As the class does for its options (when `init` is called), or if `lr` is out of range; or if a step
            changes something else than parameters and their state, or what it keeps for a parameter.

    Example:
        >>> tx = from_torch(torch.optim.RMSprop, lr=0.5, alpha=0.75)
        >>> params = {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.tensor([2.0, 0.0])}, tx.init(params), params)
        >>> updates
        {'w': tensor([-1.,  0.])}
        >>> tree.describe(state.slots)
        "{'square_avg': {'w': f32[2]}, 'step': {'w': f32[]}}"
    """
    learning_rate = kwargs.get("lr")
    if learning_rate is not None:
        checks.number_or_schedule("lr", learning_rate)
        if not isinstance(learning_rate, float | int) and _keeps_rate(optimizer_class):
            raise ValueError(
                f"{optimizer_class.__name__} keeps its first learning rate in its state, so lr must be a number, got "
                f'{learning_rate!r}; inject_hyperparams leaves it one with static=("lr",)'
            )
    # The constructor compares the rate with zero, which only a number can be; its value is put in before each step.
    is_number = isinstance(learning_rate, float | int | None)
    options = kwargs if is_number else {**kwargs, "lr": 1.0}
    _check_traceable(optimizer_class, options)
    maker = torch_steps.make(optimizer_class, options)
    # Made within a graph, as inject_hyperparams does it, the maker is a constant of it, which has no identity.
    made_at = torch_steps.make_in_graphs(optimizer_class, options) if torch.compiler.is_compiling() else None
    # Without arguments: the tracer may have replaced numbers in the options by symbols.
    find = _compat.constant_while_tracing(lambda: torch_steps.place_in_graphs(maker)) if made_at is None else None

    @_compat.compiled_on_its_own
    def init(params: Tree) -> FromTorchState:
        _check_whole(optimizer_class, params)
        leaves, spec = tree.flatten(params)
        found = [torch_steps.beginning(maker, leaf) if is_castable(leaf) else ({}, False) for leaf in leaves]
        firsts = [first for first, _ in found]
        names = sorted({name for first in firsts for name in first})
        numbers = tuple(n for n in names if any(isinstance(first.get(n), bool | int | float) for first in firsts))
        ages = [
            torch.zeros((), dtype=torch.int32, device=leaf.device) if apart else None
            for leaf, (_, apart) in zip(leaves, found, strict=True)
        ]
        columns = {
            name: [_as_tensor(first.get(name), leaf) for first, leaf in zip(firsts, leaves, strict=True)]
            for name in names
        }
        slots = {name: tree.unflatten(spec, column) for name, column in columns.items()}
        return FromTorchState(zero_count(params), tree.unflatten(spec, ages), slots, numbers)

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: FromTorchState, params: Tree) -> tuple[Tree, FromTorchState]:
        _check_whole(optimizer_class, params)
        wide = update_leaves(lambda grad, param: (grad,), grads, params)[0]
        grad_leaves, spec = tree.flatten(wide)
        values: list[Any] = list(spec.flatten_up_to(params))
        starts: list[Any] = list(spec.flatten_up_to(state.ages))
        columns = {name: list(spec.flatten_up_to(column)) for name, column in state.slots.items()}
        chosen = [index for index, grad in enumerate(grad_leaves) if grad is not None]
        updates: list[Any] = [None] * len(grad_leaves)
        if chosen:
            rate = None if learning_rate is None else scheduled(learning_rate, state.count)
            slots = [{n: column[i] for n, column in columns.items() if column[i] is not None} for i in chosen]
            ages = {str(row): starts[i] for row, i in enumerate(chosen) if starts[i] is not None}
            given = [values[i].to(full_precision(values[i].dtype)) for i in chosen], [grad_leaves[i] for i in chosen]
            tensors = [*given[0], *given[1], *[slot for each in slots for slot in each.values()], rate]
            _check_differentiable(maker, tensors)
            _check_traceable(optimizer_class, options)
            if torch.compiler.is_compiling():
                place: Any = made_at if find is None else find()
                results = iter(torch_steps.run_in_graph(place, *given, slots, ages, state.numbers, rate, False))
            else:
                results = iter(torch_steps.run(maker, *given, slots, ages, state.numbers, rate, _on_host(tensors)))
            for row, i in enumerate(chosen):
                updates[i] = next(results)
                for name in slots[row]:
                    columns[name][i] = next(results)
                if str(row) in ages:
                    starts[i] = next(results)
        new_slots = {name: tree.unflatten(spec, column) for name, column in columns.items()}
        new_state = FromTorchState(state.count + 1, tree.unflatten(spec, starts), new_slots, state.numbers)
        return tree.unflatten(spec, updates), new_state

    return GradientTransformation(init, update)


def _check_whole(optimizer_class: type[torch.optim.Optimizer], params: Tree) -> None:
    if optimizer_class not in _ELEMENTWISE:
        check_whole(params, f"the norms or means that {optimizer_class.__name__} may take of a tensor")


def _keeps_rate(optimizer_class: Any) -> bool:
    return isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.ASGD | torch.optim.Rprop)


def _as_tensor(slot: Any, leaf: Any) -> torch.Tensor | None:
    if slot is None or isinstance(slot, torch.Tensor):
        return slot
    dtype = torch.bool if isinstance(slot, bool) else torch.int32 if isinstance(slot, int) else torch.float64
    return torch.tensor(slot, dtype=dtype, device=leaf.device)


def _on_host(tensors: Sequence[Any]) -> bool:
    if torch.compiler.is_compiling() or _compat.transform_active():
        return False
    recorded = torch.is_grad_enabled()
    return all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and not (recorded and tensor.requires_grad)
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )


def _check_traceable(optimizer_class: Any, options: dict[str, Any]) -> None:
    # Constructors and steps look at the values of their options.
    for name, option in options.items():
        if isinstance(option, torch.Tensor) and (torch.compiler.is_compiling() or _compat.wrapped_by_transform(option)):
            raise TypeError(
                f"under torch.compile and torch.func, only lr may be a tensor, but {name} is {tree.describe(option)}; "
                f'give it as a number, to inject_hyperparams with static=("{name}",)'
            )


def _check_differentiable(maker: Maker, tensors: Sequence[Any]) -> None:
    if maker.on_device.get("differentiable") or not torch.is_grad_enabled():
        return
    if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
        raise TypeError(
            f"{maker.optimizer_class.__name__} cannot be differentiated: it has no option `differentiable`; detach its "
            "inputs, or call update under torch.no_grad()"
        )
