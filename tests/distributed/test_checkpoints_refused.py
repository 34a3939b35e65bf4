"""What no checkpoint could bring back is refused, by name and on all ranks; and nobody hangs."""

from pathlib import Path

from tests.distributed import checkpoint_refusals as cases
from tests.distributed.processes import run

ASCEND = "along every dimension they must ascend, since process groups number them so; make it with init_device_mesh"


def test_what_would_be_lost_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run(2, cases.refusals, str(tmp_path))
    assert first == second
    newest = f"{tmp_path}/000002-step-2"
    partial = "ValueError: w: its placements are (Partial(sum),), a sum not yet taken; redistribute it first"
    for name, message in {
        "a shard": "TypeError: block/0 is a LocalShard, which does not know the mesh that shares it out; save and load",
        "a large shard": "TypeError: w is a LocalShard",
        "a shard in like": "TypeError: w is a LocalShard",
        "large, torch.float32": "CheckpointError: w is not the same on the ranks 0 and 1; a leaf that differs between",
        "large, torch.bfloat16": "CheckpointError: w is not the same on the ranks 0 and 1",
        "large, torch.complex128": "CheckpointError: w is not the same on the ranks 0 and 1",
        "large, torch.bool": "CheckpointError: w is not the same on the ranks 0 and 1",
        "Python numbers, floats": "CheckpointError: x/0 is not the same on the ranks 0 and 1; a leaf that differs",
        "Python numbers, bools": "CheckpointError: x/0 is not the same on the ranks 0 and 1",
        "Python numbers, signs": "CheckpointError: x/0 is not the same on the ranks 0 and 1",
        "small copies": "CheckpointError: x: the ranks 0 and 1 have the same part of it with other numbers, and",
        "large copies": "CheckpointError: x: the ranks 0 and 1 have the same part of it with other numbers",
        "placements": "CheckpointError: x is not the same on the ranks 0 and 1",
        "a partial sum in like": partial,
        "another step to load": "CheckpointError: the step to load is not the same on the ranks 0 and 1",
        "no step on one": "CheckpointError: the step to load is not the same on the ranks 0 and 1",
        "a step of another type": "TypeError: step must be an int, got tensor(1)",
        "a layout on a turned mesh": f"ValueError: the mesh has the ranks [1, 0]; {ASCEND}",
        "a layout on turned copies": f"ValueError: the mesh has the ranks [[1], [0]]; {ASCEND}",
        "shards of a turned mesh": f"ValueError: the mesh has the ranks [1, 0]; {ASCEND}",
        "a turned mesh": f"ValueError: w: its mesh has the ranks [1, 0]; {ASCEND}",
        "a turned mesh in like": f"ValueError: w: its mesh has the ranks [1, 0]; {ASCEND}",
        "no writer": "CheckpointError: the checkpoint could not be written: on rank 1 of 2: MemoryError: no memory",
        "no reader": f"CheckpointError: {newest}: the checkpoint could not be read: on rank 1 of 2: MemoryError: no me",
    }.items():
        assert first.pop(name).startswith(message)
    assert first == {}


def test_groups_of_ranks_do_not_save_a_mixture(tmp_path: Path) -> None:
    results = run(4, cases.groups, str(tmp_path))
    assert results == [results[0]] * 4
    groups, behind, uneven, replicas = results[0]
    assert groups == behind
    for message, first, second in ((groups, 0, 2), (uneven, 0, 3), (replicas, 1, 3)):
        assert message.startswith(f"CheckpointError: w: the ranks {first} and {second} have the same part of it with")


def test_what_only_looks_like_that_comes_back(tmp_path: Path) -> None:
    assert run(4, cases.taken_as_they_are, str(tmp_path)) == [[True, True]] * 4


def test_saves_through_several_objects_wait_for_each_other(tmp_path: Path) -> None:
    assert run(2, cases.two_objects, str(tmp_path)) == [([10, 20, 30], True)] * 2
