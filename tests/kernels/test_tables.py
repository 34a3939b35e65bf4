"""Tables on a GPU that is not there: what is uploaded when, and what stays."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fmp.kernels import tables

GPU = torch.device("cuda", 0)


class Stream:
    """Stands in for a stream, and for the events on it."""

    def __init__(self) -> None:
        self.waited = 0

    def record_event(self) -> "Stream":
        return self

    def wait_event(self, event: "Stream") -> None:
        self.waited += event is not self


class Host:
    """What torch would do with a GPU."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.is_capturing, self.stream = False, Stream()
        self.pinned: list[torch.Tensor] = []
        self.uploads: list[bool] = []
        self.recorded: list[Stream] = []
        patch.setattr(tables, "_known", type(tables._known)())
        patch.setattr(tables, "_read_by_graphs", [])
        patch.setattr(tables, "_set_aside", [])
        patch.setattr(tables, "_largest", [0])
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor))
        patch.setattr(torch.Tensor, "to", lambda tensor, *args, **options: self._upload(tensor, *args, **options))
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.recorded.append(stream))

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        assert not self.is_capturing or tables._set_aside[0].nbytes < 1024
        self.pinned.append(tensor)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in [one.untyped_storage().data_ptr() for one in self.pinned]

    def _upload(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        assert device == GPU
        assert self.is_pinned(tensor)
        self.uploads.append(non_blocking)
        return tensor.clone()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def upload(first: int = 0) -> tables.Table:
    rows = np.arange(first, first + 6, dtype=np.int64).reshape(3, 2)
    return tables.upload(rows, [5, 0, 9], 4, GPU)


def same(found: tables.Table, other: tables.Table) -> bool:
    return all(one is another for one, another in zip(found, other, strict=True))


def test_nobody_waits_for_an_upload(host: Host) -> None:
    table = upload()
    assert host.uploads == [True, True]
    assert table.rows.view(torch.int64).tolist() == [0, 1, 2, 3, 4, 5]
    assert same(upload(), table)
    assert host.uploads == [True, True]
    assert host.stream.waited == 0


def test_another_stream_waits_for_it(host: Host) -> None:
    table = upload()
    host.stream = Stream()
    assert same(upload(), table)
    assert host.stream.waited == 2
    assert host.recorded == [host.stream] * 2


def test_a_captured_step_uploads_only_what_is_new_and_keeps_all_that_it_reads(host: Host) -> None:
    table = upload()
    host.is_capturing, host.stream = True, Stream()
    assert same(upload(), table)
    assert len(host.uploads) == 2
    assert host.stream.waited == 0  # nothing outside of a graph can be waited for
    new = upload(7)
    assert len(host.uploads) == 3
    assert new.rows.view(torch.int64).tolist() == [7, 8, 9, 10, 11, 12]
    assert new.chunks is table.chunks  # which depend on sizes alone
    *found, pinned, again = tables._read_by_graphs
    assert all(one is other for one, other in zip([*found, again], [*table, table.chunks], strict=True))
    assert host.is_pinned(pinned)
    host.is_capturing = False
    assert upload(7).rows is not new.rows  # outside of the graph they are not there
    assert len(host.uploads) == 4


def test_memory_for_graphs_is_set_aside_before(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_RESERVE", 128)
    monkeypatch.setattr(tables, "_UPLOADS", 1)
    upload()
    host.is_capturing = True
    found = [upload(10 * index) for index in range(1, 5)]  # the last ones find nothing left
    assert [table.rows.view(torch.int64)[0].item() for table in found] == [10, 20, 30, 40]
    kept = [part for part in tables._read_by_graphs if part is not found[0].chunks]
    assert len(kept) == len({part.data_ptr() for part in kept}) == 4
    host.is_capturing = False
    upload(50)
    assert tables._set_aside[0].nbytes == 128


def test_what_is_set_aside_fits_the_largest_table(host: Host) -> None:
    """A model of 7e9 parameters: only the addresses of its gradients are new to the graph, or all of a table is."""
    sizes = [2**24] * 400 + [4096] * 100_000
    rows = np.zeros((len(sizes), 7), np.int64)
    tables.upload(rows, sizes, 2**16, GPU)
    host.is_capturing, pinned = True, len(host.pinned)
    for change in (1, 2, 3):
        tables.upload(rows + change, sizes, 2**16, GPU)
    tables.upload(rows + 4, sizes[1:], 2**16, GPU)
    assert len(host.pinned) == pinned


def test_a_default_device_is_none_of_its_business(host: Host) -> None:
    with torch.device("meta"):
        table = upload()
    assert table.rows.view(torch.int64).tolist() == [0, 1, 2, 3, 4, 5]
    assert tables._set_aside[0].device.type == "cpu"


def test_the_latest_tables_are_kept(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_known", tables._Known(3 * 512))  # chunks, and two lists of rows
    kept = upload(0)
    upload(1)
    assert same(upload(0), kept)
    upload(2)
    assert same(upload(0), kept)
    count = len(host.uploads)
    upload(1)
    assert len(host.uploads) == count + 1


def test_hundreds_of_small_tables_are_kept(host: Host) -> None:
    """Such as those of compressed weights, used in turn."""
    for _ in range(2):
        for index in range(600):
            upload(index)
    assert len(host.uploads) == 601


def test_a_large_table_is_found_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_known", tables._Known(1))
    chunks = [tables.upload(np.zeros(1, np.int64), [2**20], 4, GPU).chunks for _ in range(2)]
    assert len(chunks[0]) == 2**18
    assert tables._known._bytes == chunks[0].nbytes


def test_threads_may_ask_at_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_known", tables._Known(20 * 512))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            orders = [[(7 * index + thread) % 41 for index in range(300)] for thread in range(4)]
            asked = [pool.submit(lambda order=order: [upload(first).rows for first in order]) for order in orders]
            for order, found in zip(orders, asked, strict=True):
                assert [rows.view(torch.int64)[0].item() for rows in found.result()] == order
    finally:
        sys.setswitchinterval(interval)
    assert tables._known._bytes == 512 * len(tables._known._uploads)
