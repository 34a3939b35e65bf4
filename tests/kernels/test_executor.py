"""tests.cuda_executor: it names what a kernel does wrong, whatever the order, and nothing that a kernel does right."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.cuda_executor import SCHEDULES, LaunchError, Module, build as build_module, missing
from tests.cuda_executor.build import build

SOURCE = Path(__file__).parent / "planted_bugs.cu"
KERNELS = re.findall(r"__global__ void (\w+)\(", SOURCE.read_text())

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

SAYS = {
    "race_without_warp_barrier": r"race: read of static __shared__|read of uninitialized shared memory",
    "race_across_warps": r"race: read of static .* with no barrier between \(planted_bugs.cu:\d+\)|uninitialized",
    "race_of_blocks": r"race: write of out\+0 by thread \d+, written by block \d+ thread \d+",
    "race_of_a_counter": r"race: read of out\+0",
    "race_of_write_after_read": r"race: write of static __shared__.*, read by block 0 thread \d+|race: read of static",
    "race_with_many_readers": r"race: (write|read) of static __shared__",
    "divergent_barrier": r"barrier divergence: __syncthreads at line \d+ while others wait at line \d+",
    "divergent_exit": r"exits while \d+ thread\(s\) wait at __syncthreads|__syncthreads at line \d+ after \d+ thread",
    "divergent_shuffle": r"deadlock: 0 thread\(s\) at __syncthreads, 32 in a warp collective, 32 exited",
    "divergent_mask": r"the calling lane \d+ is not in mask 0000ffff",
    "write_to_read_only": r"write to the read-only buffer x\+0 \(planted_bugs.cu:\d+\)",
    "bounds_of_global": r"out of bounds: 4-byte write .* out\+\d+ \(planted_bugs.cu:\d+\)",
    "bounds_of_global_below": r"thread 0: out of bounds: 4-byte write .* out-4 ",
    "bounds_of_shared": r"undefined behavior: an index out of bounds \(.*planted_bugs.cu:\d+\)",
    "bounds_of_dynamic": r"thread 63: out of bounds: 4-byte write .* dynamic __shared__\+256",
    "uninitialized_shared": r"thread 7: read of uninitialized shared memory static __shared__",
    "undefined_alignment": r"undefined behavior: a misaligned or null pointer",
    "undefined_shift": r"thread \d+: undefined behavior: a shift out of bounds \(.*planted_bugs.cu:\d+\)",
    "endless_loop": r"block 0: still running after its time limit",
    "endless_barriers": r"block 0: still running after its time limit",
}


@pytest.fixture(scope="module")
def planted() -> Module:
    kernels = Module(SOURCE, "checked")
    kernels.cpu_seconds = 0.05
    return kernels


def run(kernels: Module, name: str) -> np.ndarray:
    out = np.zeros(256, np.uint32)
    x = np.random.default_rng(0).integers(0, 256, 500).astype(np.uint8)
    x.flags.writeable = False
    args = {"good_atomics": [x.ctypes.data, np.int32(500)], "write_to_read_only": [x.ctypes.data]}.get(name, [])
    grid = (2,) if name in ("good_atomics", "race_of_blocks") else (1,)
    with kernels.memory(written={"out": out}, read={"x": x}):
        kernels.get_function(name)(grid, (64,), [out.ctypes.data, *args], shared_mem=256)
    return out


EXPECTED = {
    "good_ballot": [0x49249249, 0x92492492],
    "good_atomics": np.bincount(np.random.default_rng(0).integers(0, 256, 500), minlength=256),
    "good_parts_of_a_warp": [t ^ 1 if t % 32 < 16 else (t ^ 1) + (t ^ 3) for t in range(64)],
    "good_warp_barrier": [t ^ 1 for t in range(64)],
    "good_dynamic": [63 - t + 1000 + 70000 for t in range(64)],
    "good_shared_reuse": [3 * ((t + 1) % 64) + 3 for t in range(64)],
}


def test_every_planted_kernel_is_tested() -> None:
    assert sorted([*EXPECTED, *SAYS]) == sorted(KERNELS)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", EXPECTED)
def test_correct_kernels_are_clean(planted: Module, name: str, schedule: str) -> None:
    planted.schedule = schedule
    expected = np.zeros(256, np.uint32)
    expected[: len(EXPECTED[name])] = EXPECTED[name]
    assert np.array_equal(run(planted, name), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SAYS)
def test_each_bug_is_named(planted: Module, name: str, schedule: str) -> None:
    planted.schedule = schedule
    with pytest.raises(LaunchError, match=SAYS[name]):
        run(planted, name)


def test_without_the_checker_a_correct_kernel_computes_the_same() -> None:
    kernels = Module(SOURCE, "fast")
    assert np.array_equal(run(kernels, "good_shared_reuse")[:64], EXPECTED["good_shared_reuse"])


def test_an_endless_kernel_is_stopped_without_the_checker_too() -> None:
    kernels = Module(SOURCE, "fast")
    kernels.cpu_seconds = 0.05
    with pytest.raises(LaunchError, match="still running"):
        run(kernels, "endless_loop")
    assert np.array_equal(run(kernels, "good_warp_barrier")[:64], EXPECTED["good_warp_barrier"])


def test_where_stacks_are_switched_by_ucontext_all_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "COMMON", [*build_module.COMMON, "-DEXECUTOR_UCONTEXT"])
    kernels = Module(SOURCE, "fast")
    kernels.cpu_seconds = 0.05
    for name in ("good_dynamic", "good_parts_of_a_warp"):
        assert np.array_equal(run(kernels, name)[:64], EXPECTED[name])
    for name in ("divergent_barrier", "divergent_shuffle", "endless_loop", "endless_barriers"):
        with pytest.raises(LaunchError, match=SAYS[name]):
            run(kernels, name)


def test_a_random_schedule_is_reproducible_and_differs_by_seed(planted: Module) -> None:
    def first_fault(seed: int) -> str:
        planted.schedule, planted.seed = "random threads", seed
        with pytest.raises(LaunchError) as caught:
            run(planted, "race_across_warps")
        return str(caught.value)

    assert first_fault(1) == first_fault(1)
    assert len({first_fault(seed) for seed in range(1, 6)}) > 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([0, 0], r"good_atomics takes 3 arguments, got 2"),
        ([0, 0, 1000], r"good_atomics, argument 2: the kernel takes 4 bytes, got 8"),
        ([0, np.int32(0), np.int32(0)], r"argument 1: the kernel takes 8 bytes, got 4"),
        ([0, np.zeros(2), np.int32(0)], r"argument 1: an array is passed by value and must have one entry"),
        ([0, "text", np.int32(0)], r"argument 1: CuPy takes no str"),
    ],
)
def test_arguments_are_checked_against_the_signature(planted: Module, args: list[object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        planted.get_function("good_atomics")((1,), (64,), args)


@pytest.mark.parametrize(("grid", "block"), [((1,), (2048,)), ((0,), (64,)), ((1,), (0,))])
def test_a_launch_that_no_gpu_takes_is_refused(planted: Module, grid: tuple[int], block: tuple[int]) -> None:
    with pytest.raises(ValueError, match="cannot be launched"):
        planted.get_function("endless_loop")(grid, block, [0])


def test_an_unknown_kernel_and_a_source_that_does_not_compile(planted: Module, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="typo"):
        planted.get_function("typo")
    wrong = tmp_path / "wrong.cu"
    wrong.write_text('extern "C" __global__ void wrong(int* out) { out[0] = missing_name; }')
    with pytest.raises(RuntimeError, match="missing_name"):
        Module(wrong)
    wrong.write_text("void no_kernel() {}")
    with pytest.raises(RuntimeError, match="no extern"):
        Module(wrong)


def test_several_may_build_the_same_at_once(tmp_path: Path) -> None:
    source = tmp_path / "built_twice.cu"
    source.write_text(f'extern "C" __global__ void one(int* out) {{ *out = 1; }}  // {tmp_path}')
    found: list[tuple[Path, list[str]]] = []
    builders = [threading.Thread(target=lambda: found.append(build(source))) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0][0].exists()
    found[0][0].unlink()
