"""`fmp.distributed.gathered_block`: the parameters of one block at a time, gathered for the call and its gradient.

    forward     full = all_gather(cast(shards));  y = fn(full, x)                 the full parameters are freed
    backward    full = all_gather(cast(shards));  y = fn(full, x), d_full         they are freed again
                d_shards = mean over ranks of reduce_scatter(d_full)

It is `fmp.remat` of a function that gathers first. So nothing of what was gathered is kept between the passes, and all
that remat offers holds here, too.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fmp import _compat, tree
from fmp._compat import collectives
from fmp.df11.frozen import ButWeights
from fmp.df11.trees import decompress
from fmp.distributed import shards
from fmp.distributed.gathering import Leaf, Plan, gather, ranks_of
from fmp.distributed.shards import LocalShard
from fmp.policy import Policy
from fmp.policy.fields import as_dtype
from fmp.rematerialization.guards import DeterminismCheck
from fmp.rematerialization.saveable import Dots, Everything, Names, Nothing, Saveable, check_saveable, nothing
from fmp.rematerialization.transform import remat

Tree = Any

_COMPILED = (
    "{path} is a DTensor, which torch.compile cannot differentiate through a gather; pass the block what "
    "fmp.distributed.local_shards(params) returns, also inside of the compiled function"
)


class OnMesh(Protocol):
    """What a block needs of a layout: where shards lie, and in which dtype gradients are summed."""

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh."""
        ...

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of sums."""
        ...


def gathered_block(
    fn: Callable[..., Any] | None = None,
    layout: OnMesh | None = None,
    *,
    compute: Policy | torch.dtype | str | None = None,
    saveable: Saveable = nothing,
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "default",
    debug: bool = False,
) -> Callable[..., Any]:
    """Transforms a function of a block's full parameters into one of their shards.

    The parameters come as a tree, the first argument. Each leaf may be

        a DTensor        shared out along its first dimension on the layout's mesh
        a LocalShard     the same for torch.func transforms and torch.compile, see `local_shards`
        a tensor         which every rank has in full; its gradient is the rank's own, for `layout.reduce_grads`
        anything else    as it is

    and the children of a `CompressedTensor` may be any of the first three: it travels compressed and is decoded after.

    One collective gathers all shards of a block, cast before, and one returns their gradients: the mean over all ranks,
    summed in the layout's `reduce_dtype`, in the dtype and form of the shards. The full parameters live while the
    function runs, and again while its gradient is computed; so only one block's at a time, if each block of a model
    is one of these. What is not differentiated, as frozen parameters, is gathered only.

    Every rank must run the same blocks in the same order, forward and backward: the loss of each must depend on all
    blocks that it ran, whatever the numbers, or the others wait for it. Parameters that a block does not use have zero
    gradients.

    It works with `fmp.value_and_grad`, ordinary autograd and torch.func transforms. Mapped by `vmap`, the gradients of
    each sample are averaged with those of the same sample of the other ranks. Forward mode and torch.compile take
    LocalShards, no DTensors; a step that is compiled whole keeps what the compiler decides to keep. Of shards, there is
    no `jacfwd` or `hessian`: each rank would go through the entries of its own.

    Args:
        fn: A function `fn(params, *args, **kwargs)` of full plain tensors, or an `nn.Module` that is one. Without it,
            gathered_block returns a decorator.
        layout: The layout. None gathers nothing: then this is `fmp.remat`, besides the cast.
        compute: What parameters are cast to before they are gathered: a dtype, or a policy, of which `cast_to_compute`
            is applied to the block's tree. None leaves them as they are.
        saveable: What to keep besides the arguments, as for `fmp.remat`. Gathered and decoded parameters are never
            kept, except by `fmp.saveable.everything`, with which the backward pass gathers nothing.
        preserve_rng_state: As for `fmp.remat`.
        determinism_check: As for `fmp.remat`.
        debug: As for `fmp.remat`.

    Returns:
        A function with `fn`'s arguments.

    Raises:
        TypeError: If `fn`, `layout` or `saveable` is not what it should be; when called, if a DTensor lies in another
            way than the layout puts it.
        ValueError: When called, if a shard has other sizes than this rank's.
        RuntimeError: If gradients are asked for by `is_grads_batched`.
        RematError: As for `fmp.remat`.

    References:
        S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv 1910.02054;
        Y. Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, arXiv 2304.11277.

    Example:
        >>> @gathered_block(layout=None, compute=torch.bfloat16)
        ... def block(params, x):
        ...     return torch.tanh(x @ params["w"])
        >>> params, x = {"w": torch.ones(3, 3)}, torch.ones(2, 3, dtype=torch.bfloat16)
        >>> loss = lambda params: block(params, block(params, x)).float().sum()
        >>> fmp.tree.describe(fmp.grad(loss)(params))
        "{'w': f32[3,3]}"
    """
    if layout is not None and not isinstance(getattr(layout, "mesh", None), DeviceMesh):
        raise TypeError(f"layout must be a fmp.distributed.Layout or None, got {layout!r}")
    check_saveable(saveable)
    compute = _policy(compute)
    options: dict[str, Any] = {"preserve_rng_state": preserve_rng_state, "debug": debug}
    options |= {"saveable": _without_gathered(saveable), "determinism_check": determinism_check}
    return functools.partial(_block, layout, compute, options) if fn is None else _block(layout, compute, options, fn)


def full_params(params: Tree, layout: OnMesh | None, compute: Policy | torch.dtype | str | None = None) -> Tree:
    """Gathers parameters, differentiably, without remat around: they live as long as their gradient needs them.

    Args:
        params: As for `gathered_block`.
        layout: Likewise.
        compute: What to cast to before, likewise.

    Returns:
        The tree of full plain tensors.

    Raises:
        TypeError: As for `gathered_block`.
        ValueError: Likewise.

    Example:
        >>> import torch.distributed as dist
        >>> from fmp.distributed import Layout, own_shards
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layout = Layout(dist.init_device_mesh("cpu", (1,)), zero=3, blocks=["w"])
        >>> params = own_shards({"w": torch.ones(2, 2)}, layout.mesh)
        >>> full_params(params, layout, compute=torch.bfloat16)
        {'w': tensor([[1., 1.],
                [1., 1.]], dtype=torch.bfloat16)}
        >>> dist.destroy_process_group()
    """
    policy = _policy(compute)
    leaves, unflatten = shards.flatten(params)
    if layout is not None:
        dtypes, paths = _dtypes(leaves, unflatten, policy), tree.paths(unflatten(list(range(len(leaves)))))
        leaves = _gathered(leaves, paths, layout, dtypes)
    full = decompress(unflatten(leaves))
    return full if policy is None else policy.cast_to_compute(full)


@dataclasses.dataclass(frozen=True)
class ButGathered:
    """Keeps what another policy keeps, without what collectives return.

    Attributes:
        saveable: The other policy.
    """

    saveable: Saveable

    def __call__(self, op: Any, args: tuple[Any, ...]) -> bool:
        """Says whether what an operator returns is kept."""
        return getattr(op, "namespace", None) != collectives.NAMESPACE and self.saveable(op, args)


def _block(
    layout: OnMesh | None, compute: Policy | None, options: dict[str, Any], fn: Callable[..., Any]
) -> Callable[..., Any]:
    if not callable(fn):
        raise TypeError(f"gathered_block transforms a function, got {fn!r}")

    @functools.wraps(fn, _compat.described_by(fn), updated=())
    def on_full(params: Tree, /, *args: Any, **kwargs: Any) -> Any:
        return fn(full_params(params, layout, compute), *args, **kwargs)

    return remat(on_full, **options)


def _gathered(leaves: list[Any], paths: list[str], layout: OnMesh, dtypes: list[torch.dtype | None]) -> list[Any]:
    """Puts full tensors in place of shards; a shard that is there twice is gathered once."""
    ranks = None if torch.compiler.is_compiling() else ranks_of(layout.mesh)
    places: dict[Any, int] = {}
    parts: list[Tensor] = []
    plan: list[Leaf] = []
    of: list[int | None] = []
    for leaf, path, dtype in zip(leaves, paths, dtypes, strict=True):
        placed = shards.is_placed(leaf)
        if not (placed or isinstance(leaf, LocalShard)) or dtype is None:
            of.append(None)
            continue
        part = leaf.local if isinstance(leaf, LocalShard) else leaf
        # torch.compile would compile again for each tensor whose id it is asked for.
        identity = (len(of) if ranks is None else id(part), dtype)
        if identity not in places:
            if ranks is None:
                if placed:
                    raise TypeError(_COMPILED.format(path=path or "the tree"))
            elif placed:
                shards.check_placed(path, cast(Any, _compat.below_transforms(part)), layout.mesh)
            else:
                shards.check_local(path, leaf, ranks)
            places[identity] = len(parts)
            parts.append(part)
            # torch.compile takes sizes for variables when they change; the length of a range is a number to it.
            shape = leaf.shape if ranks is not None else [len(range(size)) for size in leaf.shape]
            plan.append(Leaf(tuple(shape), part.dtype, dtype, placed))
        of.append(places[identity])
    full = gather(Plan(layout.mesh, tuple(plan), layout.reduce_dtype), parts)
    return [leaf if place is None else full[place] for leaf, place in zip(leaves, of, strict=True)]


def _dtypes(leaves: list[Any], unflatten: Callable[[list[Any]], Tree], compute: Policy | None) -> list[Any]:
    """Lists the dtypes in which the tensors of a tree are to be gathered; None for what is none."""
    parts = [leaf.local if isinstance(leaf, LocalShard) else leaf for leaf in leaves]
    dtypes = [part.dtype if isinstance(part, Tensor) else None for part in parts]
    if compute is None:
        return dtypes
    forms = [None if dtype is None else torch.empty(0, dtype=dtype, device="meta") for dtype in dtypes]
    return [None if form is None else form.dtype for form in tree.leaves(compute.cast_to_compute(unflatten(forms)))]


def _policy(compute: Policy | torch.dtype | str | None) -> Policy | None:
    if compute is None or isinstance(compute, Policy):
        return compute
    return Policy(None, as_dtype("compute", compute), None)


def _without_gathered(saveable: Saveable) -> Saveable:
    # These choose no collective, or all that there is; remat knows them by their types.
    if isinstance(saveable, Nothing | Everything | Dots | Names):
        return saveable
    return ButGathered(ButWeights(saveable))
