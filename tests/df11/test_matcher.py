"""fmp.df11.published.matcher: what Python's engine says, in a time that no pattern can make long."""

import re
import warnings

import pytest
from hypothesis import given, settings, strategies as st

from fmp.df11.published.matcher import Matcher, PatternError

PIECES = ["a", "b", "1", "}", "{", "{}", "{1,2}", "{2}", "{,1}", "{1,}", *"*+?|()^$.", "(?:", "[ab]", "[^a]", "[]a]"]
PIECES += [r"\.", r"\d", r"\W", r"\{"]


@settings(max_examples=400)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.lists(st.text("ab1}{.]\n", max_size=5)))
def test_it_says_what_python_says(pattern: str, names: list[str]) -> None:
    try:
        expected = re.compile(pattern)
    except re.error:
        with pytest.raises(PatternError):
            Matcher(pattern)
        return
    try:
        matcher = Matcher(pattern)
    except PatternError as error:
        refused = str(error)
    else:
        refused = ""
        assert [matcher.matches(name) for name in names] == [expected.fullmatch(name) is not None for name in names]
    assert not refused or "at the ends only" in refused or "possessive" in refused


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("}+" * 12 + "x", "}" * 60, False),
        (".*" * 9 + "x", "a" * 300, False),
        ("(a+)+b", "a" * 3000, False),
        ("(a|a)*b", "a" * 3000, False),
        ("(a?){40}a{40}", "a" * 40, True),
        ("(?:(?:a{9}){9}){9}", "a" * 729, True),
        (r"(.*\.)*x", "a." * 1000, False),
        (r"(\w+\.?)+\.mlp", "layers." * 500 + ".mlp", True),
    ],
)
def test_what_keeps_python_busy_for_years_takes_no_time(pattern: str, name: str, expected: bool) -> None:
    assert Matcher(pattern).matches(name) is expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("x" * 501, "501 characters"),
        ("((((a{99}){99}){99}){99})", "more than 2000 parts"),
        ("((((){1000}){1000}){1000})", "more than 2000 parts"),
        ("a{99999}", "more than 2000 parts"),
        ("(" * 100 + ")" * 100, "20 deep"),
        ("(?=a)a", "only '\\(\\?:' is read"),
        ("(?i)a", "only '\\(\\?:' is read"),
        (r"(a)\1", "this escape is not read"),
        (r"\bx", "this escape is not read"),
        ("a" + "\\", "this escape is not read"),
        ("a^b", "at the ends only"),
        ("(a$)", "at the ends only"),
        ("a*+", "possessive"),
        ("a**", "repeats a repeat"),
        ("*a", "nothing to repeat"),
        ("a{3,2}", "smallest count of 3"),
        ("he(ad", "not closed"),
        ("head)", "without"),
        ("[a", "a set is not closed"),
        ("[b-a]", "is invalid"),
    ],
)
def test_what_is_not_read_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        Matcher(pattern)


@pytest.mark.parametrize("pattern", ["[[a]", "[+--b]", "[a||b]", "[a~~b]", "[a&&b]"])
def test_sets_that_may_mean_more_some_day_mean_what_they_do_now(pattern):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        expected = [bool(re.fullmatch(pattern, name)) for name in "[a-|~&b"]
    assert [Matcher(pattern).matches(name) for name in "[a-|~&b"] == expected
