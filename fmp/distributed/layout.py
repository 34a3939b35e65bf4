"""`fmp.distributed.Layout`: how the state of a train step is shared out over processes.

    zero=0      parameters, masters and optimizer state: all of it on every rank; gradients are averaged
    zero=1      each rank keeps its rows of them, and gathers all parameters for the loss; gradients are averaged, and
                each rank receives its rows
    zero=3      as 1, but what the loss computes with in blocks is gathered there, one block at a time

The state holds DTensors, `Shard(0)` on the mesh. The loss and the optimizer's arithmetic see plain tensors.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fmp import random, tree
from fmp.distributed import on_dtensors, sharing
from fmp.distributed.blocks import gathered_block
from fmp.distributed.gathering import Gather, Leaf, Plan, Ranks, Scatter, ranks_of, rows, sum_dtype
from fmp.distributed.meshes import check_ascending, check_groups
from fmp.distributed.shards import LocalShard, check_blocks, check_placed, is_placed_on
from fmp.dtypes import full_precision
from fmp.patterns import matcher

Tree = Any
T = TypeVar("T")
Update = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
_REDUCE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Whole:
    """What this rank's rows are a part of; None stands for a plain tensor that every rank has.

    Attributes:
        shape: Its shape.
    """

    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """How the state of a train step is shared out over the processes of a device mesh.

    Every rank passes its own part of the batch, all of equal size: rank r of n has the rows r * b to (r + 1) * b of the
    global batch. Then n ranks make the step that one would make with the whole batch, up to rounding, if the loss is a
    mean over the batch (or has `microbatch_weight`):

    - Gradients are averaged while they are still scaled, in `reduce_dtype`, once a step, however many microbatches.
    - All ranks agree on norms, on whether gradients are finite, and so on loss scale and skipped steps.
    - `metrics` are equal everywhere. Of the auxiliary output, floating-point numbers (without dimensions) are averaged,
      integers added up, and tensors with dimensions concatenated along the first one, by rank. What is no tensor stays
      the rank's own.
    - Floating-point buffers are averaged, in float64. Others must come out equal on every rank.
    - Seeded random numbers in the loss are those of the rank's rows, see `fmp.random.part_of_batch`, and each number of
      a master is rounded by its place in the whole tensor. So neither depends on the number of ranks. Where
      `microbatch_weight` lets parts differ in size, rows of one part may get the numbers of another's.

    What the step takes besides, such as `frozen`, must be equal on every rank; nobody looks at it.

    The optimizer runs on DTensors, with two exceptions: one that has a one-pass form works on each entry by itself, so
    it gets this rank's rows as plain tensors (and a function that chooses its mask should not go by the sizes of a
    leaf); and with `zero=0` all is plain.

    Args:
        mesh: The device mesh. Of two dimensions, the second shares out what the first repeats (HSDP).
        zero: What is shared out: 0 for nothing, 1 for parameters, masters, moments and averages, 3 for the parameters
            in the loss as well.
        reduce_dtype: The dtype in which gradients are summed. Those in float64 are summed in float64. float16 has a
            narrow range, so it needs a loss scale that keeps gradients in it, and bfloat16 does not.
        blocks: With `zero=3`, patterns (see `fmp.patterns.matches`) of the parameters that the loss gets as shards of
            the type `LocalShard`, for `gathered_block` or `full_params`. Others are gathered before.

    Raises:
        TypeError: If `mesh` is no DeviceMesh.
        ValueError: If another argument is out of range, or the mesh has more than two dimensions, or descending ranks,
            or lacks this process.

    References:
        S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv 1910.02054.
    """

    mesh: DeviceMesh
    zero: int = 0
    reduce_dtype: torch.dtype = torch.float32
    blocks: Sequence[str] = ()
    ranks: Ranks = field(init=False, repr=False)
    part: int = field(init=False, repr=False)  # which part of the batch this rank has
    _is_in_block: Callable[[str], bool] = field(init=False, repr=False)

    is_shared = True

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, DeviceMesh):
            raise TypeError(f"mesh must be a DeviceMesh, as init_device_mesh('cuda', (8,)) makes it, got {self.mesh!r}")
        if self.zero not in (0, 1, 3) or isinstance(self.zero, bool):
            raise ValueError(f"zero must be 0, 1 or 3, got {self.zero!r}")
        if self.reduce_dtype not in _REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype must be a floating-point dtype of 16 bits or more, got {self.reduce_dtype}")
        if (self.zero == 3) != bool(self.blocks):
            raise ValueError(
                f"zero={self.zero} {'needs' if self.zero == 3 else 'takes no'} blocks, the patterns of the parameters "
                f"that the loss gathers itself; got blocks={self.blocks!r}"
            )
        check_ascending(self.mesh)
        ranks = ranks_of(self.mesh)
        outer = self.mesh.get_local_rank(0) if self.mesh.ndim == 2 else 0
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "part", outer * ranks.size + ranks.rank)
        object.__setattr__(self, "_is_in_block", matcher(self.blocks))

    @property
    def reduces_in_loss(self) -> bool:
        """Whether some gradients come averaged, as those of blocks do."""
        return self.zero == 3

    @property
    def size(self) -> int:
        """The number of ranks, and of parts of the batch."""
        return sharing.count(self.ranks)

    def check_alike(self, values: Tree) -> None:
        """Raises a `ValueError` unless all ranks have the same values, as far as a checksum tells; it waits for them.

        Args:
            values: Any tree; DTensors are not looked at.
        """
        tensors = {path: leaf for path, leaf in tree.items(values) if isinstance(leaf, Tensor)}
        plain = {path: leaf for path, leaf in tensors.items() if not isinstance(leaf, DTensor)}
        sharing.check_alike(self.ranks, plain, self.mesh.device_type)

    def together(self, work: Callable[[], T]) -> T:
        """Does a piece of work without collectives on every rank, and raises on all of them if it raises on one.

        Raises:
            ValueError: If it raised on other ranks only; the message names them, and what they met.
        """
        check_groups(self.mesh)
        return sharing.together(self.ranks, work, self.mesh.device_type)

    def place(self, values: Tree) -> Tree:
        """Copies what every rank has in full to where it shall lie.

        Args:
            values: A tree of tensors, equal on all ranks. Unless `zero` is 0, DTensors that lie as the layout puts them
                are copied as they are.

        Returns:
            The tree, with a DTensor of this rank's rows for each floating-point tensor with dimensions if `zero` is
            not 0, and copies of the others.

        Raises:
            ValueError: If a tensor is on another device than the mesh, or a pattern of `blocks` matches no path.
            TypeError: If a DTensor lies in another way.
            RuntimeError: If the process groups of the mesh have been destroyed.
        """
        check_groups(self.mesh)
        check_blocks(self.blocks, values)

        def put(path: str, leaf: Any) -> Any:
            if isinstance(leaf, DTensor):
                self._check(path, leaf)
                return leaf.clone()
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.device.type != self.mesh.device_type:
                raise ValueError(f"{path}: a tensor on {leaf.device}, but the mesh is on {self.mesh.device_type}")
            if self.zero == 0 or not leaf.is_floating_point() or leaf.ndim == 0 or leaf.numel() == 0:
                return leaf.to(leaf.device, copy=True)
            own = leaf.detach()[slice(*self._bounds(leaf.shape[0]))]
            return self._dtensor(own.clone(memory_format=torch.contiguous_format), leaf.shape)

        return tree.map_with_path(put, values)

    def opened(self, values: Tree) -> tuple[Tree, Tree]:
        """Takes this rank's parts out of a placed tree, without a copy, and describes their wholes.

        Raises:
            TypeError: If a DTensor lies in another way than the layout puts it.
            RuntimeError: If the process groups of the mesh have been destroyed.
        """
        if not torch.compiler.is_compiling():
            check_groups(self.mesh)
            for index, leaf in enumerate(tree.leaves(values)):
                if isinstance(leaf, DTensor) and not (self.zero and is_placed_on(leaf, self.mesh)):
                    self._check(tree.paths(values)[index], leaf)
        return self._opened(values)

    def _opened(self, values: Tree) -> tuple[Tree, Tree]:
        wholes = tree.map(lambda leaf: Whole(tuple(leaf.shape)) if isinstance(leaf, DTensor) else None, values)
        return tree.map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, values), wholes

    def closed(self, parts: Tree, wholes: Tree) -> Tree:
        """Makes a placed tree of this rank's parts."""

        def put(part: Any, whole: Whole | None) -> Any:
            return part if whole is None or part is None else self._dtensor(part, whole.shape)

        return tree.map(put, parts, wholes)

    def initial(self, init: Callable[[Tree], Tree], params: Tree) -> Tree:
        """Makes the state of an optimizer for placed parameters: DTensors of rows, and plain tensors."""
        with on_dtensors.mixing():
            return tree.map(lambda leaf: on_dtensors.settled(leaf, self.mesh), init(params))

    def full(self, values: Tree) -> Tree:
        """Gathers a placed tree, for example parameters to evaluate with.

        Args:
            values: Any part of the state; all ranks must pass it.

        Returns:
            The tree with whole plain tensors, on every rank; all of them copies, which no step overwrites.

        Raises:
            TypeError: If a DTensor lies in another way than a layout on this mesh puts it.
        """
        for path, leaf in tree.items(values):
            if isinstance(leaf, DTensor):
                check_placed(path, leaf, self.mesh)
        parts, wholes = self._opened(values)

        # Else a donating step would overwrite some of what is returned, and leave the rest.
        def copied(part: Any, whole: Whole | None) -> Any:
            return part.clone() if whole is None and isinstance(part, Tensor) else part

        return self._gathered(tree.map(copied, parts, wholes), wholes, [False] * len(tree.leaves(parts)))

    def offsets(self, wholes: Tree) -> Tree:
        """Says at which flat index of the whole tensor each part begins."""

        def start(whole: Whole | None) -> int:
            return 0 if whole is None else self._bounds(whole.shape[0])[0] * math.prod(whole.shape[1:])

        return tree.map(start, wholes)

    def gather(self, params: Tree, wholes: Tree) -> Tree:
        """Makes of this rank's parts what the loss sees: whole tensors, all in one collective, or shards for blocks."""
        return self._gathered(params, wholes, self._in_blocks(params))

    def _gathered(self, parts: Tree, wholes: Tree, in_block: list[bool]) -> Tree:
        found, spec = tree.flatten(parts)
        flat_wholes: list[Any] = spec.flatten_up_to(wholes)
        chosen: list[int] = []
        for index, whole in enumerate(flat_wholes):
            if whole is not None and in_block[index]:
                found[index] = LocalShard(found[index], torch.Size(whole.shape))
            elif whole is not None:
                chosen.append(index)
        if chosen:
            plan = self._plan([flat_wholes[index] for index in chosen], [found[index].dtype for index in chosen])
            for index, full in zip(chosen, Gather.forward(plan, *[found[i] for i in chosen]), strict=True):
                found[index] = full
        return tree.unflatten(spec, found)

    def drawing(self) -> AbstractContextManager[Any]:
        """Lets random numbers be drawn for this rank's part of the batch."""
        return random.part_of_batch(self.part)

    def reduce(self, grads: Tree, wholes: Tree) -> Tree:
        """Averages gradients over all ranks, in one collective for each dtype, and returns this rank's rows of them.

        Args:
            grads: The gradients by what `gather` returned. Those of a block are averaged already.
            wholes: The wholes that the parameters are parts of.

        Returns:
            The means, in float32 or wider.
        """
        spec = tree.structure(wholes)
        flat_wholes = tree.leaves(wholes)
        found: list[Any] = list(spec.flatten_up_to(grads))
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for index, (grad, whole) in enumerate(zip(found, flat_wholes, strict=True)):
            if isinstance(grad, LocalShard):
                found[index] = grad.local.to(full_precision(grad.local.dtype))
            elif grad is not None:
                kinds.setdefault((full_precision(grad.dtype), whole is not None), []).append(index)
        for (dtype, is_shared_out), chosen in kinds.items():
            own = [found[index] for index in chosen]
            if is_shared_out:
                plan = self._plan([flat_wholes[index] for index in chosen], [dtype] * len(chosen))
                means = Scatter.forward(plan, *own)
            else:
                means = sharing.means(self.ranks, own, sum_dtype(dtype, self.reduce_dtype))
            for index, mean in zip(chosen, means, strict=True):
                found[index] = mean.to(dtype)
        return tree.unflatten(spec, found)

    def measure(self, grads: Tree, wholes: Tree) -> tuple[Tensor, Tensor]:
        """Measures gradients that `reduce` returned.

        Returns:
            This rank's share, f64[], of the sum of squares, and whether its parts are finite, bool[].
        """
        leaves, spec = tree.flatten(grads)
        flat_wholes = spec.flatten_up_to(wholes)
        shared = [grad for grad, whole in zip(leaves, flat_wholes, strict=True) if whole is not None]
        alike = [grad for grad, whole in zip(leaves, flat_wholes, strict=True) if whole is None]
        return sharing.measured(self.ranks, shared, alike, self.mesh.device_type)

    def totals(self, sums: Sequence[Tensor], means: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Adds up some tensors over all ranks, and averages others, in one collective, in float64."""
        return sharing.totals(self.ranks, sums, means)

    def concatenated(self, tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Concatenates each tensor with those of the other ranks, in one collective."""
        return sharing.concatenated(self.ranks, tensors, dim)

    def block(self, fn: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        """Transforms a function of a block's parameters into one of their shards: `gathered_block` on this layout."""
        return gathered_block(fn, self, **options)

    def transform(
        self, update: Update, grads: Tree, state: Tree, params: Tree, wholes: tuple[Tree, Tree]
    ) -> tuple[Tree, Tree]:
        """Runs the `update` of an optimizer on DTensors, so that norms and means in it are those of whole tensors."""
        of_params, of_state = wholes
        if self.zero == 0:
            return update(grads, state, params)
        pairs = (grads, of_params), (state, of_state), (params, of_params)
        with on_dtensors.mixing():
            updates, new = update(*[on_dtensors.mixed(self.closed(part, wholes), self.mesh) for part, wholes in pairs])
        return tree.map(self._part, updates, of_params), tree.map(self._part, new, of_state)

    def _check(self, path: str, leaf: DTensor) -> None:
        if self.zero == 0:
            raise TypeError(
                f"{path or 'the tensor'} is a DTensor, but with zero=0 every rank has all of each tensor: pass "
                "leaf.full_tensor(), or what layout.full(state) makes of a state of zero=1 or 3"
            )
        check_placed(path, leaf, self.mesh)

    def _bounds(self, count: int) -> tuple[int, int]:
        start, length = rows(count, self.ranks.size, self.ranks.rank)
        return start, start + length

    def _dtensor(self, part: Tensor, shape: Sequence[int]) -> DTensor:
        return on_dtensors.dtensor(part, shape, self.mesh)

    def _part(self, leaf: Any, whole: Whole | None) -> Any:
        return on_dtensors.part_of(leaf, None if whole is None else slice(*self._bounds(whole.shape[0])), self.mesh)

    def _in_blocks(self, values: Tree) -> list[bool]:
        if self.zero != 3:
            return [False] * len(tree.leaves(values))
        return [self._is_in_block(path) for path in tree.paths(values)]

    def _plan(self, wholes: Sequence[Any], dtypes: Sequence[torch.dtype]) -> Plan:
        leaves = [Leaf(tuple(whole.shape), dtype, dtype) for whole, dtype in zip(wholes, dtypes, strict=True)]
        return Plan(self.mesh, tuple(leaves), sum_dtype(dtypes[0], self.reduce_dtype))
