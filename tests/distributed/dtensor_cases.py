"""DTensors and shards in functions that know nothing of layouts, run by tests/distributed/test_dtensors.py."""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fmp
from fmp import numerics, optim
from fmp.distributed import own_shards

Tree = Any


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def flags() -> list[tuple[str, bool, bool]]:
    """Whether trees are finite: what was asked, whether it should be, and whether it was found to be."""
    place, size = mesh(), distributed.get_world_size()
    found: list[tuple[str, bool, bool]] = []

    def ask(name: str, tree: Tree, expected: bool) -> None:
        flag = fmp.all_finite(tree)
        found.append((name, expected, bool(flag.full_tensor() if isinstance(flag, DTensor) else flag)))

    for row in range(size):
        for bad in (float("nan"), float("inf"), -float("inf")):
            for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64):
                whole = torch.ones(size, 3)
                whole[row, 1] = bad
                sharded = distribute_tensor(whole, place, [Shard(0)]).to(dtype)
                fine = distribute_tensor(torch.ones(size, 3), place, [Shard(1)]).to(dtype)
                ask(f"{dtype} {bad} on {row}", {"w": sharded}, False)
                ask(f"{dtype} {bad} on {row} of two", {"v": fine, "w": sharded}, False)
                ask(f"{dtype} fine", {"v": fine}, True)
    last = torch.ones(2)
    last[1] = float("nan") if distributed.get_rank() == size - 1 else 1.0
    huge = DTensor.from_local(torch.full((2,), 3e38), place, [Partial()], run_check=False)
    ask("a sum with NaN", DTensor.from_local(last, place, [Partial()], run_check=False), False)
    ask("a sum that overflows", {"huge": huge}, False)
    one = distribute_tensor(torch.full((1, 3), float("nan")), place, [Shard(0)])
    fine = distribute_tensor(torch.ones(1, 3), place, [Shard(0)])
    same = distribute_tensor(torch.ones(3), place, [Replicate()])
    bad = distribute_tensor(torch.full((3,), float("inf")), place, [Replicate()])
    ask("others have no rows", [one, same], False)
    ask("others have no rows, and all is fine", [fine, same], True)
    ask("on every rank", [fine, bad], False)
    ask("beside a plain tensor", [fine, same, torch.ones(3)], True)
    ask("beside a plain tensor with NaN", [fine, torch.tensor([1.0, float("nan")])], False)
    ask("NaN beside a plain tensor", [one, torch.ones(3)], False)

    def loss(w: Tensor) -> Tensor:
        return torch.where(fmp.all_finite(w), (w * w).sum(), 0.0)

    for name, tensor in (("fine", fine), ("NaN", one)):
        gradient = torch.func.grad(loss)(tensor).full_tensor()
        found.append((f"in a loss, {name}", name == "fine", bool((gradient == 2.0).all())))
    return found


def gathered(leaf: Any) -> Any:
    if not isinstance(leaf, DTensor):
        return leaf
    # gloo knows no int16.
    wide: Any = leaf.to(torch.int32) if leaf.dtype == torch.int16 else leaf
    return wide.full_tensor().to(leaf.dtype)


def masters() -> list[tuple[str, Tree, Tree]]:
    """What each form of masters makes of DTensors, gathered, and of whole tensors."""
    place, found = mesh(), []
    whole = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    whole[0] = torch.tensor([float("inf"), torch.finfo(torch.float32).max, -0.0])
    halves = torch.tensor([1.0, 1.5]).to(torch.bfloat16).view(torch.int16).to(torch.int32)
    whole[4, :2] = (halves * 2**16 + 2**15).view(torch.float32)  # half way between two numbers of bfloat16

    def both(full: Tensor, form: str) -> Tree:
        params = {"w": full.to(torch.bfloat16)}
        rest = fmp.master.init(params, {"w": full}, form=form)
        updated = fmp.tree.map(lambda leaf: leaf * 1.01, fmp.master.merge(params, rest, form=form))
        return rest, fmp.master.split(updated, params, rest, form=form), updated

    for form in ("f32", "remainder", "kahan", "stochastic"):
        for split in (Shard(0), Shard(1), Replicate()):
            parts = distribute_tensor(whole, place, [split])
            found.append((f"{form} {split}", fmp.tree.map(gathered, both(parts, form)), both(whole, form)))
    return found


def message_of(attempt: Any) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def rounding_by_chance() -> str:
    rows = distribute_tensor(torch.ones(4, 3), mesh(), [Shard(0)])
    params = {"w": rows.to(torch.bfloat16)}
    rest = fmp.master.init(params, {"w": rows}, form="stochastic")
    return message_of(lambda: fmp.master.split({"w": rows}, params, rest, form="stochastic", seed=3))


def random_words() -> list[tuple[Tensor, Tensor]]:
    """Words at indices that are shared out, and at the same ones together; i64 where they need it."""
    found = []
    for index in (torch.arange(7, dtype=torch.int32), torch.arange(7) + 2**33):
        words = fmp.random.bits_at(2**40 + 5, distribute_tensor(index, mesh(), [Shard(0)]))
        assert isinstance(words, DTensor)
        found.append((words.full_tensor(), fmp.random.bits_at(2**40 + 5, index)))
    return found


def numbers() -> tuple[Tree, Tree]:
    """Parameters and updates; a rank has no rows of one of them."""
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(7, 4, generator=generator), "one": torch.randn(1, 5, generator=generator)}
    params["w"][6, 1] = float("nan")
    updates = fmp.tree.map(lambda leaf: leaf * 10.0 ** -torch.randint(0, 12, leaf.shape, generator=generator), params)
    updates["w"][0] = 0.0
    return {**params, "ids": torch.arange(3)}, {**updates, "ids": None}


def watched(params: Tree, updates: Tree) -> Tree:
    watch = numerics.watch_gradients("fp16", scale=1e-3)
    return watch.update(updates, watch.init(params), params)[1].measured


MEASURES = {
    "histogram": lambda params, updates: numerics.histogram(params),
    "loss_in": lambda params, updates: numerics.loss_in(updates, "fp16", scale=8.0),
    "suggest_scale": lambda params, updates: numerics.suggest_scale(updates, "f8e4m3"),
    "suggest_scale, all": lambda params, updates: numerics.suggest_scale(updates, "fp16", tolerance=0.0, margin=1),
    "lost_updates": lambda params, updates: numerics.lost_updates(fmp.cast(params, torch.bfloat16), updates),
    "watch_gradients": watched,
    "in a loss": lambda params, updates: torch.func.grad(lambda w: (w.sum(), numerics.histogram(w)), has_aux=True)(
        updates["one"]
    )[1],
}


def measured() -> list[tuple[str, Tree, Tree]]:
    """What is measured of DTensors, and of whole tensors."""
    params, updates = numbers()
    row, found = mesh(), []
    grid = init_device_mesh("cpu", (2, distributed.get_world_size() // 2))
    for place, split in ((row, [Shard(0)]), (row, [Shard(1)]), (grid, [Replicate(), Shard(0)])):

        def spread(leaf: Any, place: DeviceMesh = place, split: Any = split) -> Any:
            is_shared = isinstance(leaf, Tensor) and leaf.ndim == 2
            return distribute_tensor(leaf, place, split) if is_shared else leaf

        trees = fmp.tree.map(spread, params), fmp.tree.map(spread, updates)
        for name, measure in MEASURES.items():
            found.append((f"{name} of {split}", measure(*trees), measure(params, updates)))
    part = DTensor.from_local(updates["w"], row, [Partial()], run_check=False)
    size = distributed.get_world_size()
    found.append(("of a sum", numerics.histogram(part), numerics.histogram(size * updates["w"])))
    return found


def clipped() -> list[tuple[str, Tree, Tree]]:
    """What clipping makes of DTensors beside plain tensors, as FSDP2 leaves them, and of plain ones."""
    generator = torch.Generator().manual_seed(0)
    whole = {"w": torch.randn(5, 3, generator=generator), "b": torch.randn(3, generator=generator), "none": None}
    split = {**whole, "w": distribute_tensor(whole["w"], mesh(), [Shard(0)])}
    found = []
    for bound in (0.5, 1e3):
        clip = optim.clip_by_global_norm(bound)
        parts = fmp.tree.map(gathered, clip.update(split, (), split)[0])
        found.append((f"clipped to {bound}", parts, clip.update(whole, (), whole)[0]))
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    parts, expected = [optimizer.update(each, optimizer.init(each), each)[0] for each in (split, whole)]
    found.append(("and then adamw", fmp.tree.map(gathered, parts), expected))
    return found


class OwnAdam(torch.optim.Adam):
    """May work on whole tensors, for all that one knows."""


def measured_compiled() -> tuple[Tree, Tree]:
    """What compiled functions measure of DTensors, and others of whole tensors."""
    params, updates = numbers()
    part = distribute_tensor(updates["w"], mesh(), [Shard(0)])

    def both(params: Tree, updates: Tree) -> Tree:
        return watched(params, updates), fmp.all_finite(updates)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    found = compiled({"w": part}, {"w": part})
    return fmp.tree.map(gathered, found), both({"w": params["w"]}, {"w": updates["w"]})


def refused() -> list[str]:
    """What is said of shards, and of a DTensor beside a plain tensor."""
    place = mesh()
    params, updates = numbers()
    parts = own_shards(params, place), own_shards(updates, place)
    steps = [message_of(lambda measure=measure: measure(*parts)) for measure in MEASURES.values()][:6]
    for optimizer_class in (torch.optim.Muon, torch.optim.Adafactor, OwnAdam, torch.optim.NAdam):
        optimizer = optim.from_torch(optimizer_class)
        shards = own_shards({"w": params["w"]}, place)
        steps.append(message_of(lambda optimizer=optimizer, shards=shards: optimizer.init(shards)))
    w = distribute_tensor(params["w"], place, [Shard(0)])
    steps.append(message_of(lambda: numerics.lost_updates({"w": w}, {"w": updates["w"]})))
    return steps
