"""The command that looks into the numbers of a model's weights: `python -m fmp inspect`."""

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from fmp import terminal
from fmp.df11 import model_files
from fmp.df11.container import WeightFile
from fmp.df11.model_files import ModelFiles
from fmp.numerics import saved
from fmp.numerics.inspection import TARGETS, Inspected, Lost, inspect
from fmp.numerics.tables import percent
from fmp.terminal import OK, printable, rich, with_bar

_EXPLAINED = (
    "For each tensor: the smallest and the largest magnitude that is neither zero nor infinite, how many elements are "
    "zero, and how many are infinite or NaN; then, for each format, the share of the nonzero finite elements that a "
    "cast would make zero, that it would make subnormal (with fewer digits), and that would overflow, in percent; and "
    "the bits an element takes in DF11."
)
_NOTHING = "·"
_WIDE = 10_000
_NAME = 12  # of the characters of a name, how many a line has at least
_INDEX = ".safetensors.index.json"


def add_commands(commands: Any) -> None:
    """Adds `inspect` to what `argparse.ArgumentParser.add_subparsers` returned."""
    summary = "show the range of each tensor in a model, and what each format would lose of it"
    parser = commands.add_parser(
        "inspect",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {_EXPLAINED}",
        epilog="exit codes: 0 done; 1 a file is damaged; 2 it could not be done as asked",
    )
    parser.add_argument(
        "source",
        metavar="PATH",
        help="a safetensors file, a folder of a Hugging Face model or its index, or a state dict from torch.save",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, also for an error")
    parser.set_defaults(run=partial(terminal.run, _inspect))


def _inspect(options: argparse.Namespace) -> int:
    if not options.json:
        rich("table")  # to say so before the work, not after it
    is_saved_by_torch = saved.is_saved_by_torch(options.source)
    model = model_files.find(options.source) if is_saved_by_torch else _find(options.source)
    tensors, files, size = _of_torch(model.root) if is_saved_by_torch else _of_safetensors(model)
    if options.json:
        left_out = [str(path) for path in model.left_out]
        found = [_as_json(tensor, file) for tensor, file in zip(tensors, files, strict=True)]
        print(json.dumps({"bytes": size, "tensors": found, "left_out": left_out}))
    else:
        tensors = _told_apart(tensors, files)
        _print_table(tensors)
        _print_summary(tensors, size, model)
    return OK


def _of_torch(path: Path) -> tuple[list[Inspected], list[str], int]:
    """Looks into a file of `torch.save`; returns its tensors, the file of each, and the bytes."""
    tensors = saved.saved_tensors(path)
    sizes = [tensor.nbytes for tensor in tensors.values()]
    found = [inspect(name, tensors[name]) for name in with_bar(list(tensors), sizes, path.name)]
    return found, [path.name] * len(found), os.path.getsize(path)


def _of_safetensors(model: ModelFiles) -> tuple[list[Inspected], list[str], int]:
    """Looks into the files of a model; returns its tensors, the file of each, and the bytes."""
    tensors: list[Inspected] = []
    files: list[str] = []
    size = 0
    for file in model.weights:
        with WeightFile(model.root / file, plain=True) as weights:
            names = list(weights.records)
            for name in with_bar(names, [weights.describe(name)[2] for name in names], Path(weights.path).name):
                tensors.append(_read(weights, name))
                files.append(str(file) if model.is_folder else Path(weights.path).name)
            size += os.path.getsize(model.root / file)
    return tensors, files, size


def _find(path: str) -> ModelFiles:
    """Finds the files of a model; of one that is given by its index, those in the index."""
    if not path.endswith(_INDEX) or not os.path.isfile(path):
        return model_files.find(path)
    model = model_files.find(Path(path).parent)  # which has checked the index
    shards = {Path(shard) for shard in json.loads(Path(path).read_bytes())["weight_map"].values()}
    return dataclasses.replace(model, weights=[file for file in model.weights if file in shards])


def _read(weights: WeightFile, name: str) -> Inspected:
    # When it is left, the tensor is gone: one is in memory at a time.
    return inspect(name, cast(torch.Tensor, weights.read(name, decompress=True)))


def _told_apart(tensors: list[Inspected], files: list[str]) -> list[Inspected]:
    """Adds its file to each name that several files hold."""
    counts = Counter(tensor.name for tensor in tensors)
    return [
        dataclasses.replace(tensor, name=f"{tensor.name} ({file})") if counts[tensor.name] > 1 else tensor
        for tensor, file in zip(tensors, files, strict=True)
    ]


def _as_json(tensor: Inspected, file: str) -> dict[str, Any]:
    dtype, _, shape = tensor.described.removesuffix("]").partition("[")
    fields = dataclasses.asdict(tensor)
    del fields["described"]
    return {**fields, "file": file, "dtype": dtype, "shape": [int(length) for length in shape.split(",") if length]}


def _print_table(tensors: list[Inspected]) -> None:
    console = rich("console").Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:  # a file has no width that lines should keep to
        console = rich("console").Console(file=sys.stdout, highlight=False, width=_WIDE)
    wide = console.options.update(width=_WIDE)
    table = _table(tensors, narrow=False)
    if console.measure(table, options=wide).maximum <= console.width:
        console.print(table)
    elif console.measure(_table(tensors, narrow=True, names=_NAME), options=wide).maximum <= console.width:
        console.print(_table(tensors, narrow=True))
    else:  # a table would lose its first column
        for tensor in tensors:
            print(_block(tensor))


def _block(tensor: Inspected) -> str:
    """Writes what a row of the table says in a few lines."""
    name, shape, smallest, largest, zeros, bad = _facts(tensor)
    lines = [f"{name} {shape}"]
    if zeros:
        magnitudes = f"{smallest} to {largest}, " if smallest else ""
        lines.append(f"  {magnitudes}{zeros} zeros, {bad} inf/NaN")
    for target, lost in (tensor.lost or {}).items():
        if (losses := _losses(lost, narrow=True)) != _NOTHING:
            lines.append(f"  {target} %: {', '.join(losses.splitlines())}")
    if tensor.df11_nbytes:
        lines.append(f"  DF11 bits: {_df11_bits(tensor)}")
    return "\n".join(lines)


def _table(tensors: list[Inspected], *, narrow: bool, names: int | None = None) -> Any:
    """Makes a table; a narrow one has two columns of the wide one below each other, and losses too.

    Args:
        tensors: What it shows.
        narrow: Which of the two.
        names: The most characters in a line of a name.
    """
    text = rich("text").Text
    headings = ["tensor", "shape", "smallest", "largest", "zeros", "inf/NaN"]
    rows = [_facts(tensor) for tensor in tensors]
    if narrow:
        headings, rows = _in_pairs(headings), [_in_pairs(row) for row in rows]
    style = {"pad_edge": False, "header_style": "bold", "show_lines": narrow, "collapse_padding": narrow}
    table = rich("table").Table(box=rich("box").SIMPLE_HEAD, **style)
    for heading in headings:
        name = heading.startswith("tensor")
        justify = "left" if name or heading == "shape" else "right"
        least, most = (_NAME, names) if name else (None, None)
        look = {"overflow": "fold", "no_wrap": not name, "min_width": least, "max_width": most}
        table.add_column(heading, justify=justify, **look)
    for target in TARGETS:
        table.add_column(f"{target}\n%" if narrow else f"{target}\nzero/sub/over %", justify="right", no_wrap=True)
    table.add_column("DF11\nbits", justify="right", no_wrap=True)
    for tensor, row in zip(tensors, rows, strict=True):
        bad = tensor.infinities or tensor.nans
        cells = [text(cell, style="bold red" if bad and cell == row[-1] else "") for cell in row]
        for target in TARGETS:
            lost = (tensor.lost or {}).get(target)
            cells.append(text(_losses(lost, narrow=narrow), style="red" if lost and lost.overflow else ""))
        table.add_row(*cells, text(_df11_bits(tensor)))
    return table


def _df11_bits(tensor: Inspected) -> str:
    return f"{8 * tensor.df11_nbytes / tensor.numel:.2f}" if tensor.df11_nbytes else ""


def _facts(tensor: Inspected) -> list[str]:
    smallest, largest = ("" if value is None else f"{value:.3g}" for value in (tensor.smallest, tensor.largest))
    bad = "" if tensor.nans is None else f"{(tensor.infinities or 0) + tensor.nans:,}"
    zeros = "" if not tensor.numel or tensor.zeros is None else f"{percent(tensor.zeros / tensor.numel)} %"
    return [printable(tensor.name), tensor.described, smallest, largest, zeros, bad]


def _in_pairs(cells: list[str]) -> list[str]:
    return [f"{upper}\n{lower}".rstrip() for upper, lower in zip(cells[::2], cells[1::2], strict=True)]


def _print_summary(tensors: list[Inspected], size: int, model: ModelFiles) -> None:
    elements = Counter[str]()
    for tensor in tensors:
        elements[tensor.described.partition("[")[0]] += tensor.numel
    counts = ", ".join(f"{count:,} {dtype}" for dtype, count in elements.most_common())
    print(f"{len(tensors)} tensors, {counts or 'no elements'}, {size / 1e6:,.3f} MB with headers")
    halves = [tensor for tensor in tensors if tensor.df11_nbytes]
    if halves:
        plain, packed = sum(2 * tensor.numel for tensor in halves), sum(tensor.df11_nbytes or 0 for tensor in halves)
        print(f"bf16 in DF11: {plain / 1e6:,.3f} MB -> {packed / 1e6:,.3f} MB ({packed / plain:.1%})")
    bad = [tensor for tensor in tensors if tensor.infinities or tensor.nans]
    if bad:
        print(f"infinities or NaN in {len(bad)} of {len(tensors)} tensors, the first is {printable(bad[0].name)}")
    for path, reason in model.left_out.items():
        print(f"{printable(str(model.root / path))}: left out, as {reason}")


def _losses(lost: Lost | None, *, narrow: bool) -> str:
    if lost is None:
        return ""
    parts = {"zero": lost.zero, "sub": lost.subnormal, "over": lost.overflow}
    if not any(parts.values()):
        return _NOTHING
    if narrow:
        return "\n".join(f"{percent(part)} {name}" for name, part in parts.items() if part)
    return " / ".join(map(percent, parts.values()))
