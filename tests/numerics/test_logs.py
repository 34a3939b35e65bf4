import errno
import io
import json
import logging
import struct
import sys
import threading

import numpy as np
import pytest
import torch

from fmp.numerics.history import History
from fmp.numerics.logs import write_jsonl, write_tensorboard
from fmp.numerics.record import record

START = '{"step": '


def history_of(values) -> History:
    recorded = record(lambda state, batch: (state, {"loss": batch, "skipped": ~batch.isfinite()}), length=4)
    carry = recorded.init({}, torch.tensor(0.0))
    for value in values:
        carry, _ = recorded(carry, torch.tensor(value))
    return carry[1]


def read_lines(path):
    def refuse(text):
        raise AssertionError(text)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_json_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    assert write_jsonl(history_of([0.1, float("nan"), float("-inf")]), path) == 3
    assert read_lines(path) == [
        {"step": 0, "loss": 0.1, "skipped": False},
        {"step": 1, "loss": "nan", "skipped": True},
        {"step": 2, "loss": "-inf", "skipped": True},
    ]
    assert float(read_lines(path)[2]["loss"]) == float("-inf")


def test_json_lines_are_appended_once(tmp_path):
    path, values = tmp_path / "log.jsonl", [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    for stop, appended in ((2, 2), (2, 0), (5, 3), (6, 1)):
        assert write_jsonl(history_of(values[:stop]), path) == appended
    assert [line["loss"] for line in read_lines(path)] == values


def steps_in(path):
    return [(line["step"], line["loss"]) for line in read_lines(path)]


@pytest.mark.parametrize("first", [0.5, 9.0])  # with the same seed, the first step is the same
def test_another_run_goes_behind_the_first_with_a_warning(tmp_path, first):
    path = tmp_path / "log.jsonl"
    write_jsonl(history_of([0.5, 1.5, 2.5]), path)
    with pytest.warns(UserWarning, match=r"log.jsonl' held another run, up to step 2; 2 steps of this one are behind"):
        assert write_jsonl(history_of([first, 8.0]), path) == 2
    assert write_jsonl(history_of([first, 8.0, 7.0]), path) == 1
    assert steps_in(path) == [(0, 0.5), (1, 1.5), (2, 2.5), (0, first), (1, 8.0), (2, 7.0)]


def test_a_resumed_run_is_no_other_run(tmp_path):
    path = tmp_path / "log.jsonl"
    write_jsonl(history_of([0.5, 1.5, 2.5, 3.5]), path)
    assert write_jsonl(history_of([0.5, 1.5, 2.75]), path) == 3  # it went on from the second step
    assert steps_in(path)[4:] == [(0, 0.5), (1, 1.5), (2, 2.75)]
    assert write_jsonl(history_of([0.5, 1.5, 2.75, *[1.0] * 6]), path) == 4  # what was between is not kept any more
    assert [step for step, _ in steps_in(path)[7:]] == [5, 6, 7, 8]


@pytest.mark.parametrize("write", [write_jsonl, write_tensorboard])
def test_what_is_no_history_is_refused(tmp_path, write):
    history = history_of([0.5])
    with pytest.raises(TypeError, match="got the pair of state and history; pass its second part"):
        write(({}, history), tmp_path / "log")
    with pytest.raises(TypeError, match=r"must be a History, .* got a dict"):
        write(history.arrays(), tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_a_line_that_was_cut_off_is_replaced(tmp_path):
    path = tmp_path / "log.jsonl"
    write_jsonl(history_of([0.5, 1.5]), path)
    whole = path.read_bytes()
    for cut in range(len(START), len(whole)):
        path.write_bytes(whole[:cut])
        write_jsonl(history_of([0.5, 1.5]), path)
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [
        "import torch\n", "my notes, without an end of line", "{", '{"step"', '{"lr": 1}', '{"lr": 1}\n', "{}\n", "\n",
        '{"step": "one"}\n', '{"step": 1}\n\n', '{"step": 1}\nnotes', '{"step": 1}\n[', '{"step": 1, \n', "\0" * 9,
        '[{"step": 1}]\n', '{"step": 1}\nimport torch\n', "x" * 70_000,
    ],
)  # fmt: skip
def test_a_file_that_is_no_history_is_left_alone(tmp_path, content):
    path = tmp_path / "train.py"
    path.write_text(content)
    with pytest.raises(ValueError, match="ends with no line of a history"):
        write_jsonl(history_of([0.5]), path)
    assert path.read_text() == content


@pytest.mark.filterwarnings("ignore:.*held another run")
@pytest.mark.parametrize("before", ["", '{"step": 7, "loss": 1.0}\n'])
def test_a_whole_line_without_its_end_is_kept(tmp_path, before):
    path = tmp_path / "log.jsonl"
    path.write_text(before + '{"step": 100, "important": "by hand"}')
    assert write_jsonl(history_of([0.5]), path) == 1
    ours = '{"step": 0, "loss": 0.5, "skipped": false}'
    assert path.read_text() == before + '{"step": 100, "important": "by hand"}\n' + ours + "\n"


@pytest.mark.filterwarnings("ignore:.*held another run")
def test_a_file_that_another_has_locked_is_waited_for(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "log.jsonl"
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writing = threading.Thread(target=write_jsonl, args=(history_of([0.5]), path))
        writing.start()
        file.write(b'{"step": 0, ')
        file.flush()
        writing.join(0.3)
        file.write(b'"run": 1}\n')
    writing.join(60)
    assert read_lines(path) == [{"step": 0, "run": 1}, {"step": 0, "loss": 0.5, "skipped": False}]


def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuse(file, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert write_jsonl(history_of([0.5]), tmp_path / "log.jsonl") == 1


def test_long_lines_are_found(tmp_path):
    names = {f"{'x' * 500}{index}": torch.tensor(1.0) for index in range(200)}
    recorded = record(lambda state, batch: (state, names))
    carry = recorded.init({}, torch.tensor(0.0))
    for appended in (1, 1, 1):
        carry, _ = recorded(carry, torch.tensor(0.0))
        assert write_jsonl(carry[1], tmp_path / "log.jsonl") == appended
    assert [line["step"] for line in read_lines(tmp_path / "log.jsonl")] == [0, 1, 2]


def test_devices_are_left_alone():
    with pytest.raises(OSError, match="not a regular file"):
        write_jsonl(history_of([0.5]), "/dev/null")


def read_events(folder):
    """Reads the scalars in event files: records with an 8-byte length, a checksum, the event, a checksum."""
    protocol = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = {}
    for path in sorted(folder.iterdir()):
        file = io.BytesIO(path.read_bytes())
        while header := file.read(12):
            event = protocol.Event()
            event.ParseFromString(file.read(struct.unpack("<Q", header[:8])[0]))
            file.read(4)
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_event_files(tmp_path):
    folder = tmp_path / "run"
    since = write_tensorboard(history_of([0.5, 1.5]), folder)
    assert since == 2
    assert write_tensorboard(history_of([0.5, 1.5, float("nan")]), folder, since=since) == 3
    found = read_events(folder)
    assert sorted(found["loss"])[:2] == [(0, 0.5), (1, 1.5)]
    assert [step for step, _ in sorted(found["skipped"])] == [0, 1, 2]
    assert np.isnan(dict(found["loss"])[2])


def test_event_files_keep_what_is_not_finite_without_a_word(tmp_path, caplog):
    write_tensorboard(history_of([float("nan"), float("inf"), 1.0]), tmp_path)
    assert not caplog.records
    np.testing.assert_array_equal([value for _, value in read_events(tmp_path)["loss"]], [np.nan, np.inf, 1.0])
    logging.getLogger("tensorboardX.x2num").warning("still heard")
    assert [record.message for record in caplog.records] == ["still heard"]


def test_event_files_need_a_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match="the extra `tools`"):
        write_tensorboard(history_of([0.5]), tmp_path)
