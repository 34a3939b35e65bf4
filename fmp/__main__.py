"""The command line: `python -m fmp`."""

import argparse
import sys
from collections.abc import Sequence

from fmp import __version__, terminal
from fmp.df11 import cli as df11_cli
from fmp.memory import cli as memory_cli
from fmp.numerics import cli as numerics_cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The words after `python -m fmp`; by default, those of this process.

    Returns:
        The exit code.

    Example:
        >>> main(["df11", "verify", "no such file"])
        2
    """
    try:
        return _main(arguments)
    finally:
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:  # The reader, such as `head`, has seen enough of the help.
            terminal.discard_output()
        except OSError:  # Python says so when the process ends, and gives it an exit code.
            pass


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fmp", description="Functional mixed precision for PyTorch.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in (df11_cli, memory_cli, numerics_cli):
        module.add_commands(commands)
    options = parser.parse_args(arguments)
    if "run" not in options:
        (options.parser if "parser" in options else parser).print_help()
        return 0
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
