"""Checkpoints of a lone process: what is kept, what is noticed, what is refused."""

import hashlib
import json
import logging
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fmp
from fmp import tree
from fmp.distributed import Checkpoints, manifest, storage
from fmp.errors import CheckpointError
from fmp.outline import seal, unseal
from tests.bits import same_bits
from tests.distributed.checkpoint_cases import blank_state, error_of, full_state


def state(seed: int = 0) -> dict[str, Any]:
    return {"w": torch.arange(6.0).reshape(2, 3) + seed, "scaler": fmp.DynamicLossScale(2.0**seed), "epoch": seed}


def data_of(checkpoints: Checkpoints) -> Path:
    [folder] = Path(checkpoints.folder).iterdir()
    return folder


def test_a_train_state_resumes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def loss(params: Any, batch: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        kept = fmp.random.keep_mask(seed, (5, 3), 0.5)
        return (torch.where(kept, batch @ params["w"], 0) ** 2).mean() * 4.0

    optimizer = fmp.optim.adamw(fmp.optim.schedules.cosine_decay(0.1, 9))
    policy = fmp.opt_level("O2", half_dtype=torch.float16)
    step = fmp.train_step(loss, optimizer, policy=policy, loss_scale=fmp.DynamicLossScale(2.0**16, growth_interval=3))
    current = step.init({"w": torch.randn(4, 3)}, seed=2**62 + 1)
    batches = torch.randn(8, 5, 4)
    checkpoints = Checkpoints(tmp_path)
    for batch in batches[:4]:
        current, _ = step(current, batch)
    checkpoints.save(current, int(current.step))
    assert 0 < current.skip_count < 4

    # A step of other hyper-parameters; those of the scaler are part of the state.
    other = fmp.train_step(loss, optimizer, policy=policy, loss_scale="dynamic")
    resumed = checkpoints.load(other.init({"w": torch.zeros(4, 3)}))
    assert same_bits(resumed, current)
    for batch in batches[4:]:
        current, _ = step(current, batch)
        resumed, _ = step(resumed, batch)
    assert same_bits(resumed, current)


@pytest.mark.parametrize("behind", [False, True])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, behind: bool) -> None:
    checkpoints = Checkpoints(tmp_path)
    if behind:
        checkpoints.save_async(full_state(1), 1).wait()
    else:
        checkpoints.save(full_state(1), 1)
    assert same_bits(checkpoints.load(blank_state()), full_state(1))


def test_views_strides_and_parameters(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    weight = torch.nn.Parameter(base.clone())
    saved = {
        "base": base,
        "row": base[1],
        "transposed": base.t(),
        "broadcast": base[0].expand(3, 6),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": weight,
        "computed": weight * 2,
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(saved, 0)
    checkpoints.save_async(saved, 1).wait()
    for like in (saved, tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), saved)):
        for step in (0, 1):
            restored = checkpoints.load(like, step)
            assert same_bits(restored, saved)
            assert all(type(leaf) is torch.Tensor and not leaf.requires_grad for leaf in restored.values())
            assert restored["transposed"].stride() == base.t().stride()
            assert len({leaf.untyped_storage().data_ptr() for leaf in restored.values()}) == len(saved)


keys = st.text("aé.~/_0 ", max_size=3) | st.sampled_from(["__metadata__", "0"]) | st.integers(0, 2)
values = st.sampled_from([torch.ones(2), torch.tensor(3), None, True, 1.5, "é", torch.zeros(0)])
trees = st.recursive(
    values, lambda inner: st.dictionaries(keys, inner, max_size=3) | st.lists(inner, max_size=3), max_leaves=6
)


@given(saved=trees)
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, saved: Any) -> None:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("tree"))
    checkpoints.save(saved, 0)
    like = tree.map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, saved)
    assert same_bits(checkpoints.load(like), saved)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "deep" / "run", keep=2)
    assert checkpoints.steps() == []
    assert checkpoints.latest() is None
    for step in (3, 10, 200):
        checkpoints.save(state(step % 7), step)
        assert checkpoints.latest() == step
    assert checkpoints.steps() == [10, 200]
    assert sorted(os.listdir(checkpoints.folder)) == ["000002-step-10", "000003-step-200"]
    for step in (10, 200):
        assert same_bits(checkpoints.load(state(), step), state(step % 7))
    everything = Checkpoints(checkpoints.folder, keep=None)
    for step in range(300, 305):
        everything.save(state(), step)
    assert everything.steps() == [10, 200, 300, 301, 302, 303, 304]


def test_a_run_that_went_back_goes_on_from_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (10, 20, 30):
        checkpoints.save(state(step % 7), step)
    checkpoints.save(state(6), 15)
    assert checkpoints.steps() == [20, 30, 15]
    assert checkpoints.latest() == 15
    assert same_bits(checkpoints.load(state()), state(6))


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for seed, step in enumerate((10, 20, 10, 10)):
        checkpoints.save(state(seed), step)
    assert checkpoints.steps() == [20, 10]
    assert same_bits(checkpoints.load(state(), 10), state(3))
    assert len(os.listdir(tmp_path)) == 2


def test_a_save_that_fails_loses_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state(1), 1)
    with mock.patch.object(FileSystemWriter, "write_data", side_effect=OSError("disk full")):
        message = "CheckpointError: the checkpoint could not be written: OSError: disk full"
        assert error_of(lambda: checkpoints.save(state(2), 2)) == message
    with mock.patch.object(manifest, "write", side_effect=OSError("disk full")):
        assert error_of(lambda: checkpoints.save(state(2), 2)) == "OSError: disk full"
    # The half-written one stays for a look, until the next save.
    assert sorted(os.listdir(tmp_path)) == ["000001-step-1", "000003-step-2"]
    assert checkpoints.steps() == [1]
    assert same_bits(checkpoints.load(state()), state(1))
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint of step 2; the complete ones are those of the steps \[1\]; "
        r"never completed, or not written by fmp, are \['000003-step-2'\]",
    ):
        checkpoints.load(state(), 2)
    checkpoints.save(state(4), 4)
    assert os.listdir(tmp_path) == ["000004-step-4"]


def test_what_cannot_be_removed_now_is_removed_later(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state(1), 1)
    with mock.patch.object(os, "rmdir", side_effect=OSError("busy")):
        checkpoints.save(state(2), 2)
    assert checkpoints.steps() == [2]
    assert len(os.listdir(tmp_path)) == 2
    checkpoints.save(state(3), 3)
    assert os.listdir(tmp_path) == ["000003-step-3"]


def test_an_error_in_the_background_comes_to_light(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), 1)
    with mock.patch.object(storage, "write", side_effect=CheckpointError("disk full")):
        pending = checkpoints.save_async(state(2), 2)
        for _ in range(2):
            assert error_of(pending.wait) == "CheckpointError: disk full"
        assert pending.done()
        pending = checkpoints.save_async(state(3), 3)  # told already
        assert same_bits(checkpoints.load(state()), state(1))
        message = "CheckpointError: the save of step 3 in the background failed: disk full"
        assert error_of(lambda: checkpoints.save_async(state(4), 4)) == message
    assert "the checkpoint of step 2 could not be written: disk full" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    checkpoints.save_async(state(5), 5).wait()
    assert checkpoints.steps() == [1, 5]


def test_waiting_may_run_out_of_time(tmp_path: Path) -> None:
    gate = threading.Event()
    checkpoints = Checkpoints(tmp_path)
    write = storage.write

    def slow_write(*args: Any) -> None:
        assert gate.wait(20)
        write(*args)

    with mock.patch.object(storage, "write", slow_write):
        pending = checkpoints.save_async(state(1), 1)
        with pytest.raises(TimeoutError):
            pending.wait(0.01)
        assert not pending.done()
        gate.set()
        pending.wait()
    assert pending.step == checkpoints.latest() == 1


def test_every_cut_of_every_file_is_noticed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    saved = {"w": torch.ones(2), "epoch": 1}
    checkpoints.save(saved, 0)
    folder = data_of(checkpoints)
    names = sorted(os.listdir(folder))
    assert names == [".metadata", "__0_0.distcp", "fmp_manifest"]

    def complaint() -> str:
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(saved)
        return str(caught.value)

    for name in names:
        path, sealed = folder / name, name == "fmp_manifest"
        data = path.read_bytes()
        path.write_bytes(data + b"\0")
        wanted = "the manifest is damaged" if sealed else f"{name} is too long: {len(data) + 1} bytes of {len(data)}"
        assert complaint().startswith(f"{folder}: {wanted}")
        for size in reversed(range(len(data))):
            os.truncate(path, size)
            wanted = "the manifest is damaged" if sealed else f"{name} is cut: {size} bytes of {len(data)}"
            assert complaint().startswith(f"{folder}: {wanted}")
        path.unlink()
        assert checkpoints.steps() == ([] if sealed else [0])
        assert complaint().startswith(f"{tmp_path}: no checkpoint" if sealed else f"{folder}: {name} is missing")
        path.write_bytes(data)
    assert same_bits(checkpoints.load({**saved, "epoch": 0}), saved)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(), 0)
    folder = data_of(checkpoints)
    like = state()
    for name in sorted(os.listdir(folder)):
        data = (folder / name).read_bytes()
        for position in range(0, len(data), 2 if name == "fmp_manifest" else 9):
            damaged = bytearray(data)
            damaged[position] ^= 1 << position % 8
            (folder / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match="is damaged"):
                checkpoints.load(like)
        (folder / name).write_bytes(data)
    assert same_bits(checkpoints.load(like), state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("w"), r"w is f32\[2,3\] in the file and absent in `like`"),
        (lambda s: s.update(b=torch.ones(2)), r"b is absent in the file and f32\[2\] in `like`"),
        (lambda s: s.update(w=s["w"].bfloat16()), r"w is f32\[2,3\] in the file and bf16\[2,3\] in `like`"),
        (lambda s: s.update(w=torch.zeros(3, 2)), r"w is f32\[2,3\] in the file and f32\[3,2\] in `like`"),
        (lambda s: s.update(w=None), r"w is f32\[2,3\] in the file and None in `like`"),
        (lambda s: s.update(epoch=0.5), r"epoch is int in the file and float in `like`"),
        (
            lambda s: s.update(scaler=fmp.StaticLossScale(1.0)),
            r"scaler is fmp.scaling.DynamicLossScale in the file and fmp.scaling.StaticLossScale in `like`",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(), 0)
    like = state()
    change(like)
    with pytest.raises(CheckpointError, match=f"000001-step-0: the checkpoint does not fit `like`:\n.*{message}"):
        checkpoints.load(like)


def reseal(folder: Path, change: Callable[[Any], None]) -> None:
    """Changes a manifest, as someone who knows its form can."""
    contents = unseal((folder / "fmp_manifest").read_text())
    change(contents)
    (folder / "fmp_manifest").write_text(seal(contents))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "the format 'fmp.distributed', version 2; this fmp reads version 1"),
        (lambda m: m.update(format="other"), "the format 'other', version 1"),
        (lambda m: m.pop("format"), "fmp_manifest is not one that fmp writes: 'format'"),
        (lambda m: m.update(step=7), "000001-step-0 holds step 7, so it was renamed; call it 000001-step-7 to load it"),
        (lambda m: m.update(step="0"), "fmp_manifest is not one that fmp writes: the step is '0'"),
        (
            lambda m: m.update(entries={"": 3}),
            "fmp_manifest is not one that fmp writes: the tree itself has the entry 3",
        ),
        (lambda m: m.update(files=[]), "fmp_manifest is not one that fmp writes"),
        (lambda m: m["files"].update({"../x": {"size": 1, "sha256": ""}}), "the file '../x' has the stamp"),
        (lambda m: m["files"].update({"x": {"size": 1.5, "sha256": ""}}), "the file 'x' has the stamp"),
        (lambda m: m["files"].update({"x": {"size": 1, "sha256": ""}}), "x is missing"),
    ],
)
def test_a_foreign_manifest_is_refused(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(), 0)
    reseal(data_of(checkpoints), change)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(state())
    assert message in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"null", b"\xff", b"{}", json.dumps({"format": 1}).encode()])
def test_a_file_of_another_kind_in_place_of_the_manifest(tmp_path: Path, text: bytes) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(), 0)
    for contents in (text, f"{hashlib.sha256(text).hexdigest()} ".encode() + text):
        (data_of(checkpoints) / "fmp_manifest").write_bytes(contents)
        with pytest.raises(CheckpointError, match="manifest is"):
            checkpoints.load(state())


def test_foreign_folders_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no checkpoint; there is no such folder"):
        Checkpoints(tmp_path / "nowhere").load(state())
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        state_dict_saver.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"itself a checkpoint of torch.distributed.checkpoint that fmp did not"):
        Checkpoints(tmp_path).load(state())
    (tmp_path / "000001-step-5").mkdir()
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"never completed, or not written by fmp, are \['000001-step-5'\]"):
        Checkpoints(tmp_path).load(state(), 5)


def test_torch_reads_the_files(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(state(), 0)
    dcp_to_torch_save(data_of(checkpoints), tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    assert torch.equal(plain["w"], state()["w"])
    assert set(plain) == {"w", "scaler/loss_scale", "scaler/growth_count"}


class _Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


@pytest.mark.parametrize(
    ("payload", "name"),
    [
        (_Payload(), "(posix|nt).mkdir"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
        (torch.save, "torch.serialization.save"),
    ],
)
def test_nothing_but_the_index_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: Any, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(state(), 0)
    folder = data_of(checkpoints)
    (folder / ".metadata").write_bytes(pickle.dumps(payload))
    stamp = manifest.stamp(folder / ".metadata")
    reseal(folder, lambda m: m["files"].update({".metadata": {"size": stamp.size, "sha256": stamp.sha256}}))
    with pytest.raises(CheckpointError, match=f"UnpicklingError: .metadata holds {name}, which torch does not put"):
        checkpoints.load(state())
    assert os.listdir(tmp_path) == ["run"]


def test_a_moved_checkpoint_loads_elsewhere(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "here")
    checkpoints.save(state(3), 7)
    (tmp_path / "there").mkdir()
    shutil.move(data_of(checkpoints), tmp_path / "there" / "000123-step-7")
    assert same_bits(Checkpoints(tmp_path / "there").load(state()), state(3))


@pytest.mark.parametrize(
    ("leaf", "error"),
    [
        (b"bytes", "TypeError: w is a bytes; a checkpoint holds tensors"),
        (torch.eye(2).to_sparse(), "TypeError: w is a Tensor of layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "ValueError: w: it is on the meta device and has no values to save"),
    ],
)
def test_leaves_that_cannot_be_saved_are_named(tmp_path: Path, leaf: Any, error: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert error_of(lambda: checkpoints.save({"w": leaf}, 0)).startswith(error)
    assert error_of(lambda: checkpoints.save_async({"w": leaf}, 0)).startswith(error)
    assert os.listdir(tmp_path) == []


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for keep in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="keep must be a positive number of checkpoints, or None"):
            Checkpoints(tmp_path, keep=keep)  # pyright: ignore[reportArgumentType]
    checkpoints = Checkpoints(tmp_path)
    for step in (torch.tensor(3), 1.0, True, None):
        with pytest.raises(TypeError, match="step must be an int"):
            checkpoints.save(state(), step)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="step must not be negative, got -1"):
        checkpoints.save(state(), -1)
    assert os.listdir(tmp_path) == []


def test_saving_inside_a_transform_is_refused(tmp_path: Path) -> None:
    def save(x: torch.Tensor) -> torch.Tensor:
        Checkpoints(tmp_path).save({"w": x}, 0)
        return x.sum()

    with pytest.raises(RuntimeError, match="save cannot run inside vmap, grad or another transform"):
        torch.func.grad(save)(torch.ones(3))
    assert os.listdir(tmp_path) == []


def test_it_is_a_frozen_value(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert repr(checkpoints) == f"Checkpoints(folder={tmp_path!r}, keep=2)"
    assert checkpoints == Checkpoints(tmp_path, keep=2)
    with pytest.raises(AttributeError):
        checkpoints.keep = 3  # pyright: ignore[reportAttributeAccessIssue]
