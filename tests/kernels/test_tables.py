"""Tables on a GPU that is not there: what is uploaded when, and what stays."""

import importlib.util
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

GPU = torch.device("cuda", 0)
MIB = 2**20


class Stream:
    """Stands in for a stream, and for the events on it."""

    def __init__(self) -> None:
        self.waited = 0

    def record_event(self) -> "Stream":
        return self

    def wait_event(self, event: "Stream") -> None:
        self.waited += event is not self


class Read:
    """Memory that a graph reads at each replay. It does not keep the memory alive."""

    def __init__(self, part: torch.Tensor):
        self._storage, self._content = weakref.ref(part.untyped_storage()), part.clone()
        self._place = int(part.storage_offset()), part.shape, part.stride()

    def is_intact(self) -> bool:
        storage = self._storage()
        if storage is None:
            return False
        return torch.equal(torch.empty(0, dtype=self._content.dtype).set_(storage, *self._place), self._content)


class Host:
    """What torch would do with a GPU, and tables that nobody has used yet."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.tables = fresh("fmp.kernels.tables")
        self.is_capturing, self.stream = False, Stream()
        self.pinned: list[Any] = []
        self.pinned_in_graphs = 0
        self.read_by_graphs: list[Read] = []
        self.uploads: list[bool] = []
        self.recorded: list[Stream] = []
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor))
        patch.setattr(torch.Tensor, "to", lambda tensor, *args, **options: self._upload(tensor, *args, **options))
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.recorded.append(stream))

    def upload(self, first: int = 0, nbytes: int = 48) -> Any:
        """Asks for a table of three rows, that begin with a number."""
        rows = np.arange(first, first + nbytes // 8, dtype=np.int64).reshape(3, -1)
        return self.tables.upload(rows, [5, 0, 9], 4, GPU)

    def captured(self, first: int = 0, nbytes: int = 48) -> Any:
        """Asks for a table for a launch that a graph repeats. What was there before is read by each replay."""
        before, self.is_capturing = len(self.uploads), True
        table = self.upload(first, nbytes)
        self.is_capturing = False
        if len(self.uploads) == before:
            self.read_by_graphs += map(Read, table)
        return table

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu"
        self.pinned_in_graphs += self.is_capturing
        self.pinned.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def _upload(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        assert device == GPU
        pinned = [storage.data_ptr() for found in self.pinned if (storage := found()) is not None]
        assert tensor.untyped_storage().data_ptr() in pinned
        if self.is_capturing:
            self.read_by_graphs.append(Read(tensor))
        self.uploads.append(non_blocking)
        return tensor.clone()


def fresh(name: str) -> Any:
    """Loads a module once more."""
    spec: Any = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def same(found: Any, other: Any) -> bool:
    return all(one is another for one, another in zip(found, other, strict=True))


def first_of(table: Any) -> int:
    return int(table.rows.view(torch.int64)[0])


def test_nobody_waits_for_an_upload(host: Host) -> None:
    table = host.upload()
    assert host.uploads == [True, True]
    assert table.rows.view(torch.int64).tolist() == [0, 1, 2, 3, 4, 5]
    assert same(host.upload(), table)
    assert host.uploads == [True, True]
    assert host.stream.waited == 0


def test_another_stream_waits_for_it(host: Host) -> None:
    table = host.upload()
    host.stream = Stream()
    assert same(host.upload(), table)
    assert host.stream.waited == 2
    assert host.recorded == [host.stream] * 2


def test_a_captured_step_uploads_only_what_is_new(host: Host) -> None:
    table = host.upload()
    host.stream = Stream()
    assert same(host.captured(), table)
    assert len(host.uploads) == 2
    assert host.stream.waited == 0  # nothing outside of a graph can be waited for
    new = host.captured(7)
    assert len(host.uploads) == 3
    assert new.rows.view(torch.int64).tolist() == [7, 8, 9, 10, 11, 12]
    assert new.chunks is table.chunks  # which depend on sizes alone
    assert host.upload(7).rows is not new.rows  # outside of the graph they are not there
    assert len(host.uploads) == 4


def test_all_that_a_captured_step_reads_stays(host: Host) -> None:
    host.upload()
    host.captured()
    for first in (7, 8):
        host.captured(first)
    assert len(host.read_by_graphs) == 4
    for first in range(3):  # nothing that was there before is among the latest
        host.upload(first, 24 * MIB)
    count = len(host.uploads)
    host.upload()
    assert len(host.uploads) == count + 1
    for first in range(100, 200):
        host.captured(first)
    assert all(read.is_intact() for read in host.read_by_graphs)


def test_memory_for_graphs_is_set_aside_before(host: Host) -> None:
    """No memory can be pinned while a graph is captured; for the next one, there is as much again."""
    size = 3 * 2**17  # the reserve is for eight as large as the largest
    host.upload(0, size)
    assert [first_of(host.captured(first, size)) for first in range(1, 9)] == [*range(1, 9)]
    assert host.pinned_in_graphs == 0
    assert first_of(host.captured(9, size)) == 9  # nothing is left, so it is tried
    assert host.pinned_in_graphs == 1
    host.upload(10, size)
    assert [first_of(host.captured(first, size)) for first in range(11, 19)] == [*range(11, 19)]
    assert host.pinned_in_graphs == 1
    assert len(host.read_by_graphs) == 17
    assert all(read.is_intact() for read in host.read_by_graphs)


def test_what_is_set_aside_fits_the_largest_table(host: Host) -> None:
    """A model of 7e9 parameters: only the addresses of its gradients are new to the graph, or all of a table is."""
    sizes = [2**24] * 400 + [4096] * 100_000
    rows = np.zeros((len(sizes), 7), np.int64)
    host.tables.upload(rows, sizes, 2**16, GPU)
    host.is_capturing = True
    for change in (1, 2, 3):
        host.tables.upload(rows + change, sizes, 2**16, GPU)
    host.tables.upload(rows + 4, sizes[1:], 2**16, GPU)
    assert host.pinned_in_graphs == 0


def test_a_default_device_is_none_of_its_business(host: Host) -> None:
    with torch.device("meta"):
        table = host.upload()
        assert host.captured(3).rows.view(torch.int64).tolist() == [3, 4, 5, 6, 7, 8]
    assert table.rows.view(torch.int64).tolist() == [0, 1, 2, 3, 4, 5]
    assert host.pinned_in_graphs == 0


def test_the_latest_tables_are_kept(host: Host) -> None:
    """They may take 32 MiB."""
    size = 12 * MIB
    kept = host.upload(0, size)
    host.upload(1, size)
    assert same(host.upload(0, size), kept)
    host.upload(2, size)
    assert same(host.upload(0, size), kept)
    count = len(host.uploads)
    host.upload(1, size)
    assert len(host.uploads) == count + 1


def test_hundreds_of_small_tables_are_kept(host: Host) -> None:
    """Such as those of compressed weights, used in turn."""
    for _ in range(2):
        for index in range(600):
            host.upload(index)
    assert len(host.uploads) == 601


def test_a_large_table_is_found_again(host: Host) -> None:
    first, again = [host.tables.upload(np.zeros(1, np.int64), [2**20], 1, GPU) for _ in range(2)]
    assert len(first.chunks) == 2**20
    assert same(first, again)


def test_threads_may_ask_at_once(host: Host) -> None:
    size = 3 * MIB // 2  # of which 21 are kept
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            orders = [[(7 * index + thread) % 41 for index in range(60)] for thread in range(4)]
            asked = [
                pool.submit(lambda order=order: [first_of(host.upload(first, size)) for first in order])
                for order in orders
            ]
            for order, found in zip(orders, asked, strict=True):
                assert found.result() == order
    finally:
        sys.setswitchinterval(interval)
    for first in range(41):
        host.upload(first, size)
    count = len(host.uploads)
    for first in range(40, 19, -1):
        host.upload(first, size)
    assert len(host.uploads) == count
    host.upload(19, size)
    assert len(host.uploads) == count + 1
