import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fmp import files


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


def write(path: Any, text: str) -> None:
    with files.atomic_write(path) as temporary:
        temporary.write_text(text)


def test_creates_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write(path, "one")
    assert path.read_text() == "one"
    write(str(path), "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_target_is_untouched_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write(path, "one")
    with files.atomic_write(path) as temporary:
        temporary.write_text("two")
        assert temporary.parent == path.parent
        assert path.read_text() == "one"
    assert path.read_text() == "two"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_raising_block_leaves_no_trace(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    write(path, "one")

    def interrupted() -> None:
        with files.atomic_write(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_data_is_synced_before_the_rename_and_the_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    events: list[tuple[str, Any]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        events.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        events.append(("replace", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write(path, "one")
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert events == [("fsync", file), ("replace", file), ("fsync", folder)]


@pytest.mark.parametrize(
    ("name", "failing_call", "expected"),
    [
        ("open", 1, "one"),
        ("chmod", 1, "one"),
        ("open", 2, "one"),
        ("fsync", 1, "one"),
        ("replace", 1, "one"),
        # From here on the file has its name.
        ("open", 3, "two"),
        ("fsync", 2, "two"),
    ],
)
def test_a_failing_system_call_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, failing_call: int, expected: str
) -> None:
    path = tmp_path / "a.txt"
    write(path, "one")
    genuine, calls = getattr(os, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == failing_call:
            raise OSError("injected")
        return genuine(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing)
        with pytest.raises(OSError, match="injected"):
            write(path, "two")
    assert path.read_text() == expected
    assert os.listdir(tmp_path) == ["a.txt"]


def test_permissions_follow_the_umask(tmp_path: Path, umask: Callable[[int], int]) -> None:
    path = tmp_path / "a.txt"
    umask(0o027)
    with files.atomic_write(path) as temporary:
        # As the safetensors library does it: a private file, renamed over the one that was given.
        private = tmp_path / "private"
        private.touch(mode=0o600)
        private.replace(temporary)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "far" / "a.txt")
    write(link, "one")
    assert link.is_symlink()
    assert (tmp_path / "far" / "a.txt").read_text() == "one"
    assert os.listdir(tmp_path / "far") == ["a.txt"]


def test_long_names_are_fine(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write(path, "one")
    assert path.read_text() == "one"


def test_bad_targets_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write(tmp_path, "one")
    with pytest.raises(FileNotFoundError, match=r"nowhere.*does not exist"):
        write(tmp_path / "nowhere" / "a.txt", "one")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64, torch.bool])
def test_raw_bytes_are_numpys(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.arange(12).reshape(4, 3) % 5).to(dtype)
    tensor = torch.empty(shape, dtype=dtype) if 0 in shape else tensor[: shape[0]] if shape else tensor[1, 1]
    assert files.raw_bytes(tensor).numpy().tobytes() == tensor.numpy().tobytes()


def test_raw_bytes_resolves_strides_and_lazy_bits() -> None:
    tensor = torch.randn(3, 4, dtype=torch.complex64)
    for view in (tensor.t(), tensor.conj(), tensor.conj().imag, tensor[:, ::2], tensor[:1].expand(3, 4)):
        expected = np.ascontiguousarray(view.resolve_conj().resolve_neg())
        assert files.raw_bytes(view).numpy().tobytes() == expected.tobytes()
    assert files.raw_bytes(torch.ones(2, requires_grad=True)).shape == (8,)
    assert files.raw_bytes(torch.from_numpy(np.empty((0, 3)))).shape == (0,)
    assert files.raw_bytes(torch.arange(10.0)[::5][:1]).shape == (4,)


def test_sha256_is_hashlibs() -> None:
    assert files.sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    tensor = torch.randn(5, 3)
    assert files.sha256(tensor.t()) == hashlib.sha256(tensor.t().numpy().tobytes()).hexdigest()
    assert files.sha256(torch.empty(0)) == files.sha256(b"")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_a_replaced_file_keeps_its_permissions(tmp_path: Path, umask: Callable[[int], int], mode: int) -> None:
    path = tmp_path / "a.txt"
    write(path, "one")
    path.chmod(mode)
    with files.atomic_write(path) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) & ~mode & ~stat.S_IWUSR == 0
        temporary.write_text("two")
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, "/dev/null"):
        with pytest.raises(OSError, match="is not a regular file"):
            write(path, "one")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
