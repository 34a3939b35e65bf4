"""Which tensors make a group: the `pattern_dict` of a published folder, and its `config.json`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fmp.df11.published.matcher import Matcher, PatternError
from fmp.df11_codec.published.loops import BLOCK

PARTS = ("luts", "encoded_exponent", "sign_mantissa", "output_positions", "gaps", "split_positions")
VERSION = "0.5.0"
_KEY = "dfloat11_config"
_CHUNK_BYTES = 8


class Patterns:
    """A checked `pattern_dict`.

    Args:
        pattern_dict: From regular expressions, which must match a module's whole dotted name, to the paths of the
            submodules whose `weight` belong to the module's group, in this order. An empty list stands for the module's
            own `weight`.
        where: Named in errors.

    Raises:
        TypeError: If it has another form.
        ValueError: If a regular expression is invalid or not of the kind that `Matcher` reads, or a path is listed
            twice.
    """

    def __init__(self, pattern_dict: Mapping[str, Sequence[str]], where: str = "pattern_dict") -> None:
        if not isinstance(pattern_dict, Mapping):
            raise TypeError(f"{where} must be a dictionary, got {type(pattern_dict).__name__}")
        self.as_dict: dict[str, list[str]] = {}
        self._matchers: dict[str, Matcher] = {}
        for pattern, paths in pattern_dict.items():
            if not isinstance(pattern, str) or not isinstance(paths, list | tuple):
                raise TypeError(f"{where} must map strings to lists of strings, got {pattern!r}: {paths!r}")
            if not all(isinstance(path, str) and path for path in paths):
                raise TypeError(f"{where}[{pattern!r}] must list names of submodules, got {paths!r}")
            if len(set(paths)) < len(paths):
                raise ValueError(f"{where}[{pattern!r}] lists a path twice: {paths!r}")
            try:
                self._matchers[pattern] = Matcher(pattern)
            except PatternError as error:
                raise ValueError(f"{where} has the pattern {pattern!r}, which cannot be read: {error}") from None
            self.as_dict[pattern] = list(paths)

    def matching(self, module: str) -> list[str]:
        """Returns the patterns that match a module's name."""
        return [pattern for pattern, matcher in self._matchers.items() if matcher.matches(module)]

    def weights(self, module: str) -> list[str] | None:
        """Returns the names of the tensors in a module's group, in order, or None if no pattern matches it.

        Raises:
            ValueError: If several patterns match that list different tensors.
        """
        matching = self.matching(module)
        if not matching:
            return None
        first = self.as_dict[matching[0]]
        for other in matching[1:]:
            if self.as_dict[other] != first:
                raise ValueError(f"the patterns {matching[0]!r} and {other!r} both match the module {module!r}")
        return [joined(module, path, "weight") for path in first or [""]]


def joined(*parts: str) -> str:
    """Joins the parts of a name by dots; the root module's name is empty."""
    return ".".join(part for part in parts if part)


def read_config(path: Path) -> Patterns:
    """Reads the `config.json` of a folder.

    Raises:
        FileNotFoundError: If it does not exist.
        ValueError: If it is no JSON, or does not describe a DFloat11 model that can be read.
    """
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; give the folder of a DFloat11 model") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    ours = config.get(_KEY) if isinstance(config, dict) else None
    if not isinstance(ours, dict):
        raise ValueError(f"{path} has no dictionary {_KEY!r}; this is not the folder of a DFloat11 model")
    for key, expected in (("threads_per_block", [BLOCK]), ("bytes_per_thread", _CHUNK_BYTES)):
        if ours.get(key) != expected:
            raise ValueError(f"{path} has {key} = {ours.get(key)!r}; only {expected!r} can be read")
    try:
        return Patterns(ours.get("pattern_dict", {}), f"{path}: pattern_dict")
    except TypeError as error:
        raise ValueError(str(error)) from error


def config_text(patterns: Patterns, config: Mapping[str, Any] | None) -> str:
    """Writes the `config.json` of a folder, as the published encoder does.

    Raises:
        ValueError: If `config` holds a `dfloat11_config` already.
        TypeError: If JSON cannot hold it.
    """
    config = dict(config or {})
    if _KEY in config:
        raise ValueError(f"config must not hold {_KEY!r}, which is written here; remove it")
    ours = {
        "version": VERSION,
        "threads_per_block": [BLOCK],
        "bytes_per_thread": _CHUNK_BYTES,
        "pattern_dict": patterns.as_dict,
    }
    return json.dumps(config | {_KEY: ours}, indent=2)
