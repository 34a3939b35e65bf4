"""The bounded history of a run: a ring of rows on the device, and the same in time order as numpy arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fmp import tree
from fmp.numerics.columns import Leaf, Path, is_whole, names
from fmp.numerics.tables import in_columns, together
from fmp.numerics.watch import MEASURES, fractions


@tree.dataclass
class History:
    """The last steps of a run, as `fmp.numerics.record` keeps them: tensors on the device, and a tree like any other.

    `str` makes a table of the metrics of the first and the last step that are kept.

    Row `i % length` of the table is step `i`. It may be saved by `fmp.checkpoint`, mapped by `torch.func.vmap` and
    compiled. Each step makes a new one; looking into it by `arrays` or `latest` is what waits for the device.

    Attributes:
        count: i64[], the number of steps recorded so far.
        table: f32[length, columns], or f64 if a metric needs it: first the metrics, then three for each leaf.
        integers: i64[length, columns] of the metrics that are integers of 32 or 64 bits.
        metrics: The paths of the metrics.
        dtypes: Their dtypes.
        leaves: What is measured, and by which format: for example `("grad", "blocks/0/w", "f16")`.
        watched: Where in the state the measurements of an optimizer are.
        params_in: The format by which parameters are measured; None if they are not.
    """

    count: torch.Tensor
    table: torch.Tensor
    integers: torch.Tensor
    metrics: tuple[Path, ...] = tree.static()
    dtypes: tuple[torch.dtype, ...] = tree.static()
    leaves: tuple[Leaf, ...] = tree.static()
    watched: tuple[Path, ...] = tree.static(default=())
    params_in: torch.dtype | None = tree.static(default=None)

    @property
    def length(self) -> int:
        """How many steps are kept at most."""
        return self.table.shape[-2]

    def __str__(self) -> str:
        count = together(self.count, ndim=0)
        if count is None or self.count.ndim:
            return repr(self)
        steps = int(count)
        lines = [f"{steps:,} steps, of which the last {min(steps, self.length):,} are kept"]
        if steps:
            of_metrics, of_leaves = names(self.metrics, self.leaves)
            columns = self.arrays()
            rows = [(name, *[_shown(columns[name][at]) for at in (0, -1)]) for name in of_metrics]
            lines += in_columns([("metric", f"step {columns['step'][0]:,}", f"step {steps - 1:,}"), *rows])
            if of_leaves:
                lines.append(f"and {', '.join(MEASURES)} of {len(self.leaves)} leaves, see arrays()")
        return "\n".join(lines)

    def arrays(self) -> dict[str, npt.NDArray]:
        """Returns all steps that are kept, oldest first.

        Returns:
            By path: `step`, counted from the first recorded one; each metric, such as `loss`, `grad_norm` or, with
            several losses, `loss/generator`; and for each leaf of the gradients, if `watch_gradients` is in the
            optimizer, `grad_amax/blocks/0/w`, `grad_underflow/...` and `grad_zeros/...`; `param_amax/...` and so on
            for parameters. Shape [steps]; after vmap [members, steps]. What a step has not measured is NaN. A metric
            whose path is taken by one of these begins with `metrics/`.

        Raises:
            ValueError: If the members of a mapped history have made different numbers of steps.

        Example:
            >>> recorded = fmp.numerics.record(lambda state, batch: (state + batch, {"total": state + batch}), length=2)
            >>> carry = recorded.init(torch.tensor(0.0), torch.tensor(1.0))
            >>> for _ in range(3):
            ...     carry, metrics = recorded(carry, torch.tensor(1.0))
            >>> carry[1].arrays()["total"].tolist(), carry[1].arrays()["step"].tolist()
            ([2.0, 3.0], [1, 2])
        """
        return self.latest(self.length)

    def latest(self, n: int) -> dict[str, npt.NDArray]:
        """Returns the last `n` steps, or as many as are kept, oldest first; see `arrays`.

        Raises:
            ValueError: If `n` is negative, or the members of a mapped history have made different numbers of steps.
        """
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        counts = np.unique(self.count.cpu().numpy())
        if len(counts) != 1:
            raise ValueError(
                f"the members of this history have made from {counts.min()} to {counts.max()} steps; take one of them, "
                "with fmp.tree.map(lambda leaf: leaf[0], history)"
            )
        count = int(counts[0])
        steps = np.arange(count - min(n, count, self.length), count)
        slots = torch.from_numpy(steps % self.length).to(self.table.device)
        rows = self.table[..., slots, :].cpu()
        floats = iter(rows.unbind(-1))
        integers = iter(self.integers[..., slots, :].cpu().unbind(-1))
        of_metrics, of_leaves = names(self.metrics, self.leaves)
        found: dict[str, npt.NDArray] = {"step": steps}
        for name, dtype in zip(of_metrics, self.dtypes, strict=True):
            found[name] = _array(next(integers if is_whole(dtype) else floats), dtype)
        if self.leaves:
            measured = rows[..., -len(of_leaves) :].unflatten(-1, (len(self.leaves), len(MEASURES)))
            columns = fractions(measured.float()).flatten(-2).unbind(-1)
            found |= {name: values.numpy() for name, values in zip(of_leaves, columns, strict=True)}
        return found


def checked_history(value: Any) -> History:
    """Returns a history as it is.

    Raises:
        TypeError: If it is none.
    """
    if isinstance(value, History):
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], History):
        raise TypeError(
            "history must be a History, got the pair of state and history; pass its second part: state, history = carry"
        )
    raise TypeError(
        f"history must be a History, the second of what a step from fmp.numerics.record returns as "
        f"(state, history), metrics; got a {type(value).__name__}"
    )


def with_row(
    history: History, values: Sequence[torch.Tensor], measured: Sequence[torch.Tensor], *, overwrite: bool = False
) -> History:
    """Records one step.

    Args:
        history: The history before.
        values: The metrics, each a scalar.
        measured: What `measure` returned for each leaf, in rows of one leaf or of several.
        overwrite: Whether to write into the old table.
    """
    floats, whole = [], []
    for value, dtype in zip(values, history.dtypes, strict=True):
        (whole if is_whole(dtype) else floats).append(value)
    slot = (history.count % history.length,)

    def put(ring: torch.Tensor, scalars: list[torch.Tensor], rows: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        parts = [torch.stack([_like(value, ring) for value in scalars])] if scalars else []
        parts += [_like(row, ring) for row in rows]
        if not parts:
            return ring if overwrite else ring.clone()
        row = torch.cat(parts).detach()
        return ring.index_put_(slot, row) if overwrite else ring.index_put(slot, row)

    table, integers = put(history.table, floats, measured), put(history.integers, whole)
    return tree.replace(history, count=history.count + 1, table=table, integers=integers)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if value.dtype.kind == "f" else str(value)


def _like(value: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    # To ask is faster than to convert for nothing.
    return value if value.dtype == table.dtype and value.device == table.device else value.to(table)


def _array(values: torch.Tensor, dtype: torch.dtype) -> npt.NDArray:
    # numpy has no numbers of 16 bits with the range of bfloat16, nor of 8.
    return values.to(torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype).numpy()
