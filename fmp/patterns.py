"""Patterns that pick leaves of a tree by name: what a policy keeps in float32, an optimizer decays, a mask freezes."""

import re
from collections.abc import Callable, Iterable

from fmp import _compat

# The wildcards of a shell pattern; the splitter keeps them, at the odd places of its result. A set has at least one
# member, so a bracket right at its beginning does not close it.
_WILDCARDS = re.compile(r"(\*|\?|\[!?+.[^]]*\])", re.DOTALL)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Says whether a leaf, or a subtree that holds it, is named by one of some patterns.

    Args:
        path: The leaf's path, with `.` or `/` between its parts: `blocks.3.norm.weight`.
        patterns: Shell-style patterns (`*`, `?`, `[0-9]`), where case matters, `.` and `/` mean the same, and `*` runs
            across them. A pattern that names a module names all of its leaves. One that starts with a separator, or
            with `*` and a separator, also finds a name at the top of the tree.

    Returns:
        True if a pattern matches the path or one of its parents.

    Raises:
        TypeError: If `patterns` is a single string.
        ValueError: If a range in a pattern is empty, such as `[b-a]`.

    Example:
        >>> matches("blocks/3/norm/weight", ["*.norm"]), matches("norm.weight", ["*.norm.*"])
        (True, True)
        >>> matches("blocks/3/normal/weight", ["*.norm"])
        False
    """
    return matcher(patterns)(path)


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Prepares patterns for many questions: `matcher(patterns)(path)` is `matches(path, patterns)`.

    Args:
        patterns: As for `matches`.

    Returns:
        A function of a path. It can be called while torch.compile traces.

    Raises:
        TypeError: If `patterns` is a single string.
        ValueError: If a range in a pattern is empty, such as `[b-a]`.
    """
    if isinstance(patterns, str):
        raise TypeError(f"patterns must be a collection of strings, got the string {patterns!r}; use [{patterns!r}]")
    patterns = list(patterns)
    if not patterns:
        return lambda path: False
    alternatives = "|".join([_regex(pattern) for pattern in patterns])
    try:
        # A name may go on after the pattern's end, but only with a separator, and not if nothing was matched yet.
        regex = _compiled(rf"(?s:(?:{alternatives})(?:(?<=.)\..*)?)")
    except re.error as error:
        raise ValueError(f"cannot read the patterns {patterns}: {error}") from error

    def matches_path(path: str) -> bool:
        name = _dotted(path)
        return regex.fullmatch(name) is not None or regex.fullmatch("." + name) is not None

    return matches_path


@_compat.constant_while_tracing
def _compiled(regex: str) -> re.Pattern[str]:
    return re.compile(regex)


def _regex(pattern: str) -> str:
    parts = _WILDCARDS.split(_dotted(pattern))
    return "".join([_wildcard(part) if index % 2 else re.escape(part) for index, part in enumerate(parts)])


def _wildcard(part: str) -> str:
    if part in ("*", "?"):
        return "." if part == "?" else ".*"
    negation, members = ("^", part[2:-1]) if part.startswith("[!") else ("", part[1:-1])
    # The doubled ones are reserved for set operations in regular expressions.
    for special in ("\\", "[", "]", "^", "&", "~", "|", "--"):
        members = members.replace(special, "\\" + special)
    return f"[{negation}{members}]"


def _dotted(name: str) -> str:
    return name.replace("/", ".")
