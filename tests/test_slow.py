"""tests/slow.py names tests that there are."""

from pathlib import Path

import pytest

from tests import slow


def is_whole(config: pytest.Config) -> bool:
    """Says whether a run collects all tests: none of its arguments and options keeps a file from being read."""
    folders = {config.rootpath, Path(__file__).parent}
    given = {Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args}
    partly = any("::" in argument for argument in config.args)
    left_out = any(config.getoption(name, None) for name in ("ignore", "ignore_glob", "lf"))
    return bool(given & folders) and not partly and not left_out


def test_every_pattern_matches_a_test(pytestconfig: pytest.Config) -> None:
    if not is_whole(pytestconfig):
        pytest.skip("only a part of the tests is collected")
    assert slow.unused(pytestconfig.stash[slow.COLLECTED]) == []


def test_a_pattern_without_a_test_is_found() -> None:
    names = ["tests/test_train_lm.py::test_all_precisions_reach_the_same_validation_loss"]
    pattern = r"test_train_lm.py::test_all_precisions_reach_the_same_validation_loss"
    others = slow.unused([])
    assert pattern in others
    assert slow.unused(names) == [other for other in others if other != pattern]
