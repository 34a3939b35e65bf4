"""Tables on a GPU that is not there: what is uploaded when, and what stays."""

from typing import Any

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


def test_nobody_waits_for_an_upload(host: Host) -> None:
    table = upload()
    assert host.uploads == [True, True]
    assert table.rows.view(torch.int64).tolist() == [0, 1, 2, 3, 4, 5]
    assert upload() is table
    assert host.uploads == [True, True]
    assert host.stream.waited == 0


def test_another_stream_waits_for_it(host: Host) -> None:
    table = upload()
    host.stream = Stream()
    assert upload() is table
    assert host.stream.waited == 1
    assert host.recorded == [host.stream] * 2


def test_a_captured_step_uploads_only_what_is_new_and_keeps_all_that_it_reads(host: Host) -> None:
    table = upload()
    host.is_capturing, host.stream = True, Stream()
    assert upload() is table
    assert len(host.uploads) == 2
    assert host.stream.waited == 0  # nothing outside of a graph can be waited for
    new = upload(7)
    assert len(host.uploads) == 4
    assert tables._read_by_graphs[0] is table
    assert all(map(host.is_pinned, tables._read_by_graphs[1]))
    assert new.rows.view(torch.int64).tolist() == [7, 8, 9, 10, 11, 12]
    assert new.chunks.tolist() == table.chunks.tolist()
    host.is_capturing = False
    assert upload(7) is not new  # outside of the graph it is not there
    assert len(host.uploads) == 6


def test_memory_for_graphs_is_set_aside_before(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_RESERVE", 256)
    upload()
    host.is_capturing = True
    found = [upload(10 * index) for index in range(1, 5)]  # the last ones find nothing left
    assert [table.rows.view(torch.int64)[0].item() for table in found] == [10, 20, 30, 40]
    kept = [part for table in tables._read_by_graphs for part in table]
    assert len({part.data_ptr() for part in kept}) == len(kept)
    host.is_capturing = False
    upload(50)
    assert tables._set_aside[0].nbytes == 256


def test_the_latest_tables_are_kept(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST", 2)
    kept: Any = upload(0)
    upload(1)
    assert upload(0) is kept
    upload(2)
    assert upload(0) is kept
    count = len(host.uploads)
    upload(1)
    assert len(host.uploads) == count + 2
