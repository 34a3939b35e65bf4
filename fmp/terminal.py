"""How the commands of `python -m fmp` talk to a terminal, to other programs and to the file system."""

import argparse
import contextlib
import importlib
import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fmp.errors import DF11Error
from fmp.files import is_lack_of_memory

T = TypeVar("T")

OK, DIFFERENT, USAGE, INTERRUPTED = 0, 1, 2, 130
PIPE = 141  # What a shell shows for a program that nobody reads any more.


def run(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Runs a command, and turns what goes wrong into one line and an exit code.

    Args:
        command: The command.
        options: Its options. With `json`, what goes wrong is also printed as `{"error": ...}`.

    Returns:
        The exit code.
    """
    _occupy_closed_streams()
    if sys.stdout is None:
        _print_error("the standard output is closed")
        return USAGE
    try:
        code = _explained(command, options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # The reader, such as `head`, has seen enough.
        discard_output()
        return PIPE
    except SystemExit as stopped:
        if not isinstance(stopped.__context__, BrokenPipeError):
            raise
        discard_output()  # rich makes an end of the process of a broken pipe
        return PIPE
    except OSError as error:
        discard_output()
        _print_error(f"the standard output: {error.strerror}")
        return USAGE


def warn(line: str) -> None:
    """Prints a warning to whoever watches; the standard output stays what other programs read."""
    _print_error(line, "warning: ")


def discard_output() -> None:
    """Lets nothing be written to the standard output any more, not even at the end of the process."""
    with contextlib.suppress(OSError, ValueError):  # It may be none that has a number.
        place = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, place)
        os.close(nowhere)


def printable(text: str) -> str:
    r"""Escapes what would move the cursor, break the line, hide something, or cannot be written.

    Example:
        >>> print(printable("layers.0\x1b[31m\nfake\ud800"))
        layers.0\x1b[31m\nfake\ud800
    """
    escaped = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def whole_number(least: int) -> Callable[[str], int]:
    """Makes the type of an option of `argparse` that is a count.

    Args:
        least: The smallest number that it takes.

    Returns:
        A function that reads digits, and raises `argparse.ArgumentTypeError` for anything else.

    Example:
        >>> whole_number(1)("12")
        12
    """

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least}, written in digits, got {text!r}")
        return int(text)

    return count


def rich(module: str) -> Any:
    """Loads a module of rich, which makes tables.

    Args:
        module: Its name below `rich`.

    Raises:
        ValueError: If rich is not installed.
    """
    try:
        return importlib.import_module(f"rich.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        raise ValueError(
            "tables need rich, in the extra `tools` of fmp-torch: python -m pip install rich; or ask for --json"
        ) from error


@contextlib.contextmanager
def no_wider_than(*paths: Path) -> Iterator[None]:
    """Gives new files and folders no permission, for the group and for others, that one of some files does not give."""
    hidden = 0
    for path in paths:
        hidden |= 0o077 & ~stat.S_IMODE(os.stat(path).st_mode)
    before = os.umask(0o077)
    os.umask(before | hidden)
    try:
        yield
    finally:
        os.umask(before)


def with_bar(items: Sequence[T], sizes: Sequence[int], label: str) -> Iterator[T]:
    """Iterates, and shows how far it has come, if someone watches and tqdm is installed."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or sys.stderr is None:
        yield from items
        return
    shown = {"desc": printable(label), "unit": "B", "unit_scale": True, "leave": False, "disable": None}
    with tqdm(total=sum(sizes), **shown) as bar:
        for item, size in zip(items, sizes, strict=True):
            yield item
            bar.update(size)


def _explained(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    try:
        with _stopped_politely():
            return command(options)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        _fail(options, "interrupted; nothing was written", prefix="")
        return INTERRUPTED
    except (MemoryError, OSError, ValueError, RuntimeError) as error:
        if is_lack_of_memory(error):
            _fail(options, f"there is not enough memory: {error}".removesuffix(": "))
            return USAGE
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
        _fail(options, text)
        return DIFFERENT if isinstance(error, DF11Error | RuntimeError) else USAGE


def _fail(options: argparse.Namespace, text: str, prefix: str = "error: ") -> None:
    line = " ".join(text.split())
    if options.json:
        print(json.dumps({"error": line}))
    _print_error(line, prefix)


def _print_error(line: str, prefix: str = "error: ") -> None:
    with contextlib.suppress(OSError):  # Nobody may be there to read it.
        if sys.stderr is not None:
            print(f"{prefix}{printable(line)}", file=sys.stderr, flush=True)


def _occupy_closed_streams() -> None:
    """Opens what is closed of the three standard streams, so that no file gets the number of one."""
    for place in range(3):
        try:
            os.fstat(place)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@contextlib.contextmanager
def _stopped_politely() -> Iterator[None]:
    """Lets a request to end clean up as Ctrl-C does."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # Only the main thread may do this.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
