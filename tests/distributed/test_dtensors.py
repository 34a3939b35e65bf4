"""Functions of trees give DTensors the numbers of whole tensors, or refuse them; shards they refuse."""

import pytest
import torch

import fmp
from tests.bits import same_bits
from tests.distributed import dtensor_cases as cases
from tests.distributed.processes import run


@pytest.mark.parametrize("size", [2, 3])
def test_a_number_that_is_not_finite_is_found_on_any_rank(size: int) -> None:
    for found in run(size, cases.flags):
        assert len(found) > 40
        assert [name for name, expected, flag in found if flag != expected] == []


def test_masters_are_those_of_whole_tensors() -> None:
    for found in run(2, cases.masters):
        for name, parts, whole in found:
            assert same_bits(parts, whole), name


def test_rounding_by_chance_refuses_dtensors() -> None:
    for message in run(2, cases.rounding_by_chance):
        assert message.startswith("TypeError: stochastic rounding does not know which rows of a DTensor are this")


@pytest.mark.slow
def test_random_words_are_those_of_the_whole_index() -> None:
    for found in run(2, cases.random_words):
        for parts, whole in found:
            assert same_bits(parts, whole)


@pytest.mark.parametrize("size", [2, 4])
def test_measures_are_those_of_whole_tensors(size: int) -> None:
    for found in run(size, cases.measured):
        for name, parts, whole in found:
            assert same_bits(parts, whole), name


def test_compiled_they_are_the_same() -> None:
    for parts, whole in run(2, cases.measured_compiled):
        assert same_bits(parts, whole)


def test_clipping_takes_plain_tensors_beside_dtensors() -> None:
    for found in run(2, cases.clipped):
        for name, parts, whole in found:
            for path, leaf in fmp.tree.items(parts):
                assert type(leaf) is type(dict(fmp.tree.items(whole))[path])
            torch.testing.assert_close(parts, whole, msg=name)


def test_what_is_refused() -> None:
    rows = "is a LocalShard, of which other ranks have other rows: "
    for messages in run(2, cases.refused):
        expected = [
            f"TypeError: ids {rows}the histogram would be this rank's own; make DTensors",
            f"TypeError: one {rows}the loss",
            f"TypeError: one {rows}the scale",
            f"TypeError: one {rows}the scale",
            f"TypeError: ids {rows}what is lost",
            f"TypeError: one {rows}what is measured",
            f"TypeError: w {rows}the norms or means that Muon may take of a tensor would",
            f"TypeError: w {rows}the norms or means that Adafactor",
            f"TypeError: w {rows}the norms or means that OwnAdam",
            "no error",
            "TypeError: w: of the update and the parameter only one is a DTensor",
        ]
        assert len(messages) == len(expected)
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning), message
