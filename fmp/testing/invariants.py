"""How a check runs its laws: functions whose name is the invariant's, and whose docstring says what it means."""

import inspect
import linecache
import os
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar, cast

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from fmp.testing.global_state import restored
from fmp.user_line import LIBRARIES, is_of_mode

T = TypeVar("T")
Law = Callable[[Any], None]

# Iterating leaves out the deprecated ones; pyright does not see through its metaclass.
_ALL_HEALTH_CHECKS: Any = list(cast(Any, HealthCheck))


class Broken(AssertionError):
    """A law does not hold.

    Args:
        found: What was found, and what was expected.
        path: The path of the leaf where, if it is at one.
    """

    def __init__(self, found: str, path: str = ""):
        super().__init__(f"at {path}: {found}" if path else found)


def meanings(laws: Iterable[Law]) -> dict[str, str]:
    """Lists the invariants that some laws state.

    Returns:
        The first line of each law's docstring, by the name of the law.
    """
    return {name_of(law): (inspect.getdoc(law) or "").split("\n")[0] for law in laws}


def name_of(law: Law) -> str:
    """Returns the name of the invariant that a law states."""
    return str(getattr(law, "__name__", law))


def check_counts(**counts: int) -> None:
    """Raises unless each argument is a whole number of at least 1.

    Raises:
        ValueError: If one is not; the message names it.
    """
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")


_NOT_OWN = (*LIBRARIES, os.path.dirname(hypothesis.__file__) + os.sep, "<")
_ABOUT_BRANCHES = (
    "\nPython cannot branch on the values of tensors that are mapped over or traced; choose by torch.where, which "
    "takes both branches."
)
_ABOUT_NONE = (
    "\nA leaf of the gradients is None where there is none, one of the parameters and their moments where nothing is "
    "trained. fmp.tree.map passes it like any leaf; return None for it."
)


def run_laws(check: str, laws: Sequence[Law], case: Any, *, only: Collection[str] | None, off: Collection[Law]) -> None:
    """Runs the laws of a check, one after the other.

    Args:
        check: The name of the check.
        laws: All of its laws.
        case: What each law is called with.
        only: The names of the invariants to check; None for all.
        off: Laws that do not apply.

    Raises:
        AssertionError: If a law does not hold, or the part under test raises; the cause is chained.
        ValueError: If `only` has a name that is not one of an invariant.
    """
    known = meanings(laws)
    if isinstance(only, str) or (only is not None and not set(only) <= known.keys()):
        raise ValueError(f"{check}: invariants={only!r} must be a list of some of {list(known)}")
    for law in laws:
        name = name_of(law)
        if law in off or (only is not None and name not in only):
            continue
        try:
            with restored():  # so that what one law has seen changed is not hidden from the next
                law(case)
        except Exception as error:
            found = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}{_raised_at(error)}"
            advice = _ABOUT_NONE if "NoneType" in found else ""
            advice += _ABOUT_BRANCHES if "data-dependent control flow" in found else ""
            raise AssertionError(f"{check}: {name} is broken. {known[name]}\n{found}{advice}") from error


def _raised_at(error: Exception) -> str:
    """Names the innermost line that is neither fmp's nor a library's: the part under test, if it was at work."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(code, line) for code, line in frames if not code.co_filename.startswith(_NOT_OWN) and not is_of_mode(code)]
    if not own:
        return ""
    code, line = own[-1]
    text = linecache.getline(code.co_filename, line).strip()
    return f"\nat {code.co_filename}:{line} in {code.co_name}: {text}"


def for_all(strategy: SearchStrategy[T], law: Callable[[T], None], *, examples: int) -> None:
    """Calls a law with drawn values, the same ones every time.

    Args:
        strategy: What to draw.
        law: Called with each value; raises if it does not hold.
        examples: How many values to draw.

    Raises:
        Exception: What the law raised for the simplest value that was found to break it.
    """
    failures: list[Exception] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=_ALL_HEALTH_CHECKS,
    )
    @given(strategy)
    def run(value: T) -> None:
        try:
            law(value)
        except Exception as error:
            failures.append(error)
            raise

    try:
        run()
    except Flaky:
        # The part under test is not deterministic, and then the first thing that went wrong says more than hypothesis.
        raise failures[0] from None
