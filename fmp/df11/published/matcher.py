r"""Regular expressions of untrusted origin, matched in a time that no pattern can make long.

A folder that someone else made says in regular expressions which modules are compressed. Python's engine tries one way
after the other, and some patterns have more ways than seconds are left. Here all ways are followed at once (Glushkov):

    pattern    a(b|c)*\d        places: 1 = a, 2 = b, 3 = c, 4 = \d
    first      {1}              where a match can begin
    follow     1: {2, 3, 4}  2: {2, 3, 4}  3: {2, 3, 4}  4: {}
    last       {4}              where it can end

A name is read once. What may come next is a set of places, one bit each of a Python integer, and each character of the
name keeps those that accept it. The time is at most the length of the name times the places, of which there are 2,000.

Single characters, `.`, `\d` and sets are left to Python, which thereby says what they mean. What Python reads and this
does not (assertions, references, possessive repeats, flags) is refused.
"""

import functools
import operator
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_MOST_CHARACTERS, _MOST_STEPS, _DEEPEST = 500, 2000, 20

_SET = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_CLASS = re.compile(r"\\[dDwWsS]|\\[^a-zA-Z0-9]", re.DOTALL)
_COUNTS = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class PatternError(ValueError):
    """A pattern is not a regular expression, or not one of those that are matched here."""


class Matcher:
    r"""A regular expression, to be compared with whole names.

    Args:
        pattern: Of literals, `.`, `\d \w \s` and their opposites, sets, groups `(...)` and `(?:...)`, alternatives,
            and `* + ? {m,n}`, also lazy ones. `^` and `$` are read at the ends.

    Raises:
        PatternError: If it is invalid, uses anything else, or is too long.

    Example:
        >>> blocks = Matcher(r"(double|single)_blocks\.\d+")
        >>> blocks.matches("single_blocks.17"), blocks.matches("single_blocks.17.linear")
        (True, False)
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > _MOST_CHARACTERS:
            raise PatternError(f"it has {len(pattern)} characters, and at most {_MOST_CHARACTERS} are read")
        node = _Parser(pattern).parse()
        self._follow: list[int] = []
        self._accept: dict[str, int] = {}
        self._steps = 0
        self._nullable, self._first, self._last = self._build(node)
        self._atoms = {_compiled(atom): places for atom, places in self._accept.items()}
        # Names repeat their characters, and the sets of places.
        self._accepting = functools.lru_cache(1024)(self._places_that_accept)
        self._following = functools.lru_cache(1024)(self._places_after)

    def matches(self, name: str) -> bool:
        """Says whether the pattern matches the whole name, as `re.fullmatch` would."""
        if not name:
            return self._nullable
        places, expected = 0, self._first
        for character in name:
            places = expected & self._accepting(character)
            if not places:
                return False
            expected = self._following(places)
        return bool(places & self._last)

    def _places_that_accept(self, character: str) -> int:
        return _union(places for atom, places in self._atoms.items() if atom.fullmatch(character))

    def _places_after(self, places: int) -> int:
        return _union(self._follow[place] for place in _bits(places))

    def _build(self, node: "_Node") -> tuple[bool, int, int]:
        """Adds the places of a part of the pattern, and returns whether it matches nothing too, its first and last."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise PatternError(f"it has more than {_MOST_STEPS} parts, its repeats written out")
        match node:
            case _Atom(text):
                bit = 1 << len(self._follow)
                self._follow.append(0)
                self._accept[text] = self._accept.get(text, 0) | bit
                return False, bit, bit
            case _Choice(branches):
                nullable, first, last = zip(*map(self._build, branches), strict=True)
                return any(nullable), _union(first), _union(last)
            case _Sequence(parts):
                return self._joined([(part, "") for part in parts])
            case _Repeat(part, least, None):
                return self._joined([(part, "")] * (least - 1) + [(part, "+" if least else "*")])
            case _Repeat(part, least, most):
                return self._joined([(part, "")] * least + [(part, "?")] * ((most or 0) - least))

    def _joined(self, parts: "list[tuple[_Node, str]]") -> tuple[bool, int, int]:
        nullable, first, last = True, 0, 0
        for node, repeat in parts:
            is_optional, begin, end = self._build(node)
            is_optional |= repeat in ("*", "?")
            if repeat in ("*", "+"):
                self._lead(end, begin)
            self._lead(last, begin)
            first |= begin if nullable else 0
            last = end | (last if is_optional else 0)
            nullable &= is_optional
        return nullable, first, last

    def _lead(self, places: int, to: int) -> None:
        for place in _bits(places):
            self._follow[place] |= to


class _Atom(NamedTuple):
    text: str


class _Choice(NamedTuple):
    branches: "list[_Node]"


class _Sequence(NamedTuple):
    parts: "list[_Node]"


class _Repeat(NamedTuple):
    part: "_Node"
    least: int
    most: int | None


_Node = _Atom | _Choice | _Sequence | _Repeat


class _Parser:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text, self._at, self._depth = pattern, 0, 0

    def parse(self) -> _Node:
        node = self._choice()
        if self._at < len(self._text):
            raise PatternError(f"there is a ')' without '(' at {self._at}")
        return node

    def _choice(self) -> _Node:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _Choice(branches)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        # The whole name is compared, so that these say nothing at the ends.
        if self._depth == 0:
            self._take("^")
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if self._depth == 0 and self._text[self._at] == "$" and self._text[self._at + 1 :][:1] in ("", "|"):
                self._at += 1
                break
            parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else _Sequence(parts)

    def _repeated(self) -> _Node:
        start = self._at
        if self._counts() is not None:
            raise PatternError(f"there is nothing to repeat at {start}")
        part = self._one()
        counts = self._counts()
        if counts is None:
            return part
        least, most = counts
        if most is not None and least > most:
            raise PatternError(f"a repeat has a smallest count of {least}, and a largest of {most}")
        self._take("?")  # Whether as few or as many as possible are tried first does not matter.
        if self._take("+"):
            raise PatternError("it has a possessive repeat, which is not read")
        if self._counts() is not None:
            raise PatternError(f"it repeats a repeat at {self._at}")
        return _Repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None] | None:
        """Takes a repeat, if there is one; other braces stand for themselves."""
        for sign, counts in _REPEATS.items():
            if self._take(sign):
                return counts
        found = _COUNTS.match(self._text, self._at)
        if found is None or found[0] == "{}":
            return None
        self._at = found.end()
        least, comma, most = found.groups()
        if max(len(least), len(most)) > len(str(_MOST_STEPS)):
            raise PatternError(f"a repeat has more than {_MOST_STEPS} parts")
        return int(least or 0), (int(most) if most else None) if comma else int(least)

    def _one(self) -> _Node:
        character = self._text[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            return _Atom(_valid(self._found(_SET, "a set is not closed")))
        if character == "\\":
            return _Atom(self._found(_CLASS, "this escape is not read"))
        if character in "^$":
            raise PatternError(f"it has {character!r} at {self._at}, which is read at the ends only")
        self._at += 1
        return _Atom("." if character == "." else re.escape(character))

    def _group(self) -> _Node:
        start = self._at
        self._at += 1
        if self._take("?") and not self._take(":"):
            raise PatternError(f"it has a group that begins with '(?' at {start}; only '(?:' is read")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise PatternError(f"its groups are more than {_DEEPEST} deep")
        node = self._choice()
        self._depth -= 1
        if not self._take(")"):
            raise PatternError(f"the group at {start} is not closed")
        return node

    def _found(self, what: re.Pattern[str], otherwise: str) -> str:
        found = what.match(self._text, self._at)
        if found is None:
            raise PatternError(f"{otherwise}: {self._text[self._at :][:20]!r}")
        self._at = found.end()
        return found[0]

    def _take(self, character: str) -> bool:
        if self._text[self._at : self._at + 1] != character:
            return False
        self._at += 1
        return True


def _compiled(text: str) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what sets mean now is meant
        return re.compile(text)


def _valid(text: str) -> str:
    try:
        _compiled(text)
    except re.error as error:
        raise PatternError(f"the set {text!r} is invalid: {error}") from None
    return text


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def _bits(places: int) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest.bit_length() - 1
        places ^= lowest
