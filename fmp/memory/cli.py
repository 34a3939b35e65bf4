"""The command that counts bytes: `python -m fmp plan`."""

import argparse
import json
import sys
from functools import partial
from typing import Any

from fmp import files, terminal
from fmp.master import FORMS
from fmp.memory.accounting import EIGHT_BIT, OPTIMIZERS
from fmp.memory.activations import REMAT, Transformer
from fmp.memory.checks import parameter_count
from fmp.memory.plan import plan
from fmp.memory.planned import Plan
from fmp.policy import Policy, opt_level
from fmp.terminal import OK, rich, whole_number

_EXIT_CODES = "exit codes: 0 done; 2 it could not be done as asked"
_SIZES = ("layers", "hidden", "heads", "sequence", "batch", "vocabulary")
_NEEDED = ("layers", "hidden", "heads", "sequence")
# What these keep depends on shapes, and a number has none.
_OF_SHAPES = ("adafactor",)
_NAMES = [name for name in (*OPTIMIZERS, *EIGHT_BIT) if name not in _OF_SHAPES]
_COUNTED_WIDTH = 12  # the least for the words of a row; what is longer goes on below


def add_commands(commands: Any) -> None:
    """Adds `plan` to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "plan",
        help="count the bytes of parameters, masters, gradients, moments and activations",
        description="Count the bytes that a training run needs on each device, by kind.",
        epilog=_EXIT_CODES,
    )
    parser.set_defaults(run=partial(terminal.run, _plan), parser=parser)
    parser.add_argument("--params", required=True, metavar="N", help="the number of parameters: 3.5e9, 350M, 7B")
    parser.add_argument(
        "--optimizer", default="adamw", metavar="NAME", help=f"{', '.join(_NAMES)}, or none (%(default)s)"
    )
    parser.add_argument(
        "--policy", default="O2", help="an opt level, O0 to O3, or params=...,compute=...,output=... (%(default)s)"
    )
    parser.add_argument("--half", metavar="DTYPE", help="the half of an opt level: f16, the default, or bf16")
    parser.add_argument("--masters", metavar="FORM", help=f"of an opt level: {', '.join(FORMS)}, or false")
    parser.add_argument("--gradients", default="compute", metavar="DTYPE", help="their dtype, or none")
    parser.add_argument("--moments", metavar="DTYPE", help="their dtype, or two with a comma")
    parser.add_argument("--accumulate", type=whole_number(1), default=1, metavar="N", help="the microbatches of a step")
    parser.add_argument("--average", action="store_true", help="keep a moving average of the parameters")
    parser.add_argument("--zero", type=int, default=0, choices=range(4), metavar="STAGE", help="the ZeRO stage, 0 to 3")
    parser.add_argument(
        "--gpus",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="the devices that share the state by --zero (%(default)s)",
    )
    transformer = parser.add_argument_group("activations of a transformer")
    for name in _SIZES:
        transformer.add_argument(f"--{name}", type=whole_number(0 if name == "vocabulary" else 1), metavar="N")
    transformer.add_argument("--remat", default="none", choices=REMAT, help="what is recomputed (%(default)s)")
    parser.add_argument("--unit", default="GB", help="GB, 10^9 bytes, or GiB, 2^30 (%(default)s)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="PATH", help="write one JSON object, to the standard output or a file"
    )


def _plan(options: argparse.Namespace) -> int:
    if options.zero and options.gpus == 1:
        terminal.warn(f"--zero {options.zero} shares nothing out with one GPU; say among how many, with --gpus N")
    made = _made(options)
    if options.json in (None, "-"):
        if options.json:
            print(json.dumps(made.as_dict()))
        else:
            _print_table(made)
        return OK
    text = json.dumps(made.as_dict(), indent=2) + "\n"
    with files.atomic_write(options.json) as temporary:
        temporary.write_text(text)
    return OK


def _made(options: argparse.Namespace) -> Plan:
    try:
        return _counted(options)
    except TypeError as error:  # such as masters that are not made for a dtype
        raise ValueError(str(error)) from error


def _counted(options: argparse.Namespace) -> Plan:
    moments = None if options.moments is None else options.moments.split(",")
    optimizer = options.optimizer.replace("-", "_")
    if optimizer in _OF_SHAPES:
        raise ValueError(
            f"--optimizer {optimizer}: what it keeps depends on shapes, which a number does not tell; in Python, "
            f"fmp.memory.plan(module, {optimizer!r}) counts it"
        )
    if optimizer not in (*_NAMES, "none"):
        raise ValueError(f"--optimizer {options.optimizer!r} is not known; use one of {', '.join(_NAMES)}, or none")
    return plan(
        parameter_count("--params", options.params),
        None if optimizer == "none" else optimizer,
        _policy(options),
        gradients=None if options.gradients == "none" else options.gradients,
        accumulate=options.accumulate,
        moments=moments[0] if moments and len(moments) == 1 else moments and tuple(moments),
        average=options.average,
        activations=_transformer(options),
        remat=options.remat,
        zero=options.zero,
        devices=options.gpus,
        unit=options.unit,
    )


def _policy(options: argparse.Namespace) -> Policy | str:
    if options.policy in ("O0", "O1", "O2", "O3"):
        if options.half in (None, "f16", "fp16") and options.masters is None:
            return options.policy
        return opt_level(options.policy, half_dtype=options.half or "f16", master_weights=options.masters)
    if options.masters is not None:
        raise ValueError("--masters is of an opt level; write master=... into --policy")
    if options.half is not None:
        raise ValueError("--half is of an opt level; write the dtypes into --policy")
    return options.policy


def _transformer(options: argparse.Namespace) -> Transformer | None:
    given = {name: value for name in _SIZES if (value := getattr(options, name)) is not None}
    if not given:
        return None
    if missing := [f"--{name}" for name in _NEEDED if name not in given]:
        raise ValueError(f"activations need {', '.join(missing)}, too")
    return Transformer(**given)


def _print_table(made: Plan) -> None:
    table = rich("table").Table(title=f"{made.title}\non each device", title_justify="left", title_style="bold")
    heading, *rows = made.rows()
    for name in heading:
        table.add_column(name, justify="left" if name in ("kind", "counted") else "right", no_wrap=name != "counted")
    for row in rows:
        if row[0] == "total":
            table.add_section()
        table.add_row(*row, style="bold" if row[0] == "total" else None)
    console = rich("console").Console(file=sys.stdout, highlight=False, markup=False)
    # Numbers are not cut, however narrow a terminal is.
    *widths, words = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    least = sum(widths) + min(words, _COUNTED_WIDTH) + 3 * len(heading) + 1
    if console.width < least:
        console = rich("console").Console(file=sys.stdout, highlight=False, markup=False, width=least)
    console.print(table)
    console.print(f"not counted: {'; '.join(made.missing)}")
