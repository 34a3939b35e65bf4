"""The commands that compress weights, restore them, compare them and look into them: `python -m fmp df11`."""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fmp import patterns, terminal
from fmp.df11 import conversion, model_files
from fmp.df11.container import WeightFile
from fmp.df11.conversion import Converted, Inspected
from fmp.df11.model_files import ModelFiles
from fmp.df11_codec import codec
from fmp.dtypes import short_name
from fmp.folders import atomic_folder
from fmp.terminal import DIFFERENT, OK, no_wider_than, printable, whole_number, with_bar

_SHOWN = 20
_EXIT_CODES = "exit codes: 0 done, or equal; 1 damaged, or different; 2 it could not be done as asked"


def add_commands(commands: Any) -> None:
    """Adds `df11` and its commands to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser("df11", help="lossless bf16 weights in about 10.6 bits", description=__doc__)
    parser.set_defaults(parser=parser)
    _add_common_options(parser, json=False, threads=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    model = "a safetensors file, or a folder of a Hugging Face model"

    compress = _command(commands, "compress", _compress, "compress the bf16 tensors, and copy everything else")
    compress.add_argument("source", metavar="IN", help=model)
    compress.add_argument("target", metavar="OUT", help="the file or folder to create")
    compress.add_argument(
        "--min-numel", type=whole_number(0), default=4096, metavar="N", help="leave smaller tensors (%(default)s)"
    )
    compress.add_argument("--select", nargs="+", metavar="PATTERN", help="compress only these, e.g. '*.mlp.*.weight'")
    decompress = _command(commands, "decompress", _decompress, "restore what compress was given")
    decompress.add_argument("source", metavar="IN", help="the file or folder that compress made")
    decompress.add_argument("target", metavar="OUT", help="the file or folder to create")
    for command in (compress, decompress):
        command.add_argument("--overwrite", action="store_true", help="replace OUT; a folder, if it has no other files")

    verify = _command(commands, "verify", _verify, "compare two models bit for bit, or check one by its checksums")
    verify.add_argument("source", metavar="A", help=f"{model}, compressed or not")
    verify.add_argument("other", metavar="B", nargs="?", help="the same model, compressed or not")
    inspect = _command(commands, "inspect", _inspect, "show the bits a weight of each tensor, and the least possible")
    inspect.add_argument("source", metavar="PATH", help=f"{model}, compressed or not")


def _command(commands: Any, name: str, run: Callable[[Any], int], summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=_EXIT_CODES
    )
    # Given before the command, they are not undone by what holds without them.
    _add_common_options(parser, json=argparse.SUPPRESS, threads=argparse.SUPPRESS)
    parser.set_defaults(run=partial(terminal.run, partial(_run, run)))
    return parser


def _add_common_options(parser: argparse.ArgumentParser, *, json: Any, threads: Any) -> None:
    parser.add_argument("--json", action="store_true", default=json, help="print one JSON object, also for an error")
    parser.add_argument(
        "--threads", type=whole_number(1), default=threads, metavar="N", help="how many to use (those that torch uses)"
    )


def _run(command: Callable[[Any], int], options: argparse.Namespace) -> int:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return command(options)


def _find(path: str) -> ModelFiles:
    model = model_files.find(path)
    # Loaded while there is memory for it.
    codec.best_backend()
    return model


def _compress(options: argparse.Namespace) -> int:
    selected = patterns.matcher(options.select or ["*"])
    model = _find(options.source)
    if options.select is not None and not any(_names(model, selected, options.min_numel)):
        raise ValueError(f"no bf16 tensor of --min-numel elements is named by --select {' '.join(options.select)}")
    return _convert(options, model, partial(conversion.compress_file, selected=selected, min_numel=options.min_numel))


def _names(model: ModelFiles, selected: Callable[[str], bool], min_numel: int) -> Iterator[str]:
    for file in model.weights:
        with WeightFile(model.root / file, plain=True) as weights:
            yield from conversion.compressible(weights, selected, min_numel)


def _decompress(options: argparse.Namespace) -> int:
    return _convert(options, _find(options.source), conversion.decompress_file)


def _convert(options: argparse.Namespace, model: ModelFiles, convert: Callable[..., Converted]) -> int:
    target = Path(options.target)
    _check_target(model, options.target)
    done: dict[str, Converted] = {}

    def convert_one(file: Path, to: Path, name: str) -> None:
        done[name] = convert(
            file, to, progress=lambda sources: with_bar(sources, [s.most_bytes for s in sources], name)
        )

    if model.is_folder:
        if target.is_dir() and any(target.iterdir()) and not options.overwrite:
            raise FileExistsError(f"the folder {options.target!r} is not empty; give another name, or --overwrite")
        files = [*model.others, *model.weights]
        replaceable = {file.as_posix() for file in files}.__contains__
        with (
            no_wider_than(model.root),
            atomic_folder(target, overwrite=options.overwrite, replaceable=replaceable) as folder,
        ):
            for file in files:
                with no_wider_than(*[model.root / part for part in (file, *file.parents)]):
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    if file in model.others:
                        shutil.copyfile(model.root / file, folder / file)
                    else:
                        convert_one(model.root / file, folder / file, str(file))
    else:
        if target.is_dir():
            raise ValueError(f"IN is a file, and OUT is the folder {options.target!r}; give the name of a file in it")
        if os.path.lexists(target) and not options.overwrite:
            raise FileExistsError(f"{options.target!r} exists already; give another name, or --overwrite")
        with no_wider_than(model.root):
            convert_one(model.root, target, model.root.name)
    _print_converted(options, done, model)
    return OK


def _check_target(model: ModelFiles, target: str) -> None:
    if not target:
        raise ValueError("OUT is empty; give a name")
    source, real = Path(os.path.realpath(model.root)), Path(os.path.realpath(target))
    if source == real:
        raise ValueError("OUT is IN; give another name")
    if model.is_folder and (source in real.parents or real in source.parents):
        raise ValueError("one of the folders IN and OUT is inside of the other; give another name")


def _print_converted(options: argparse.Namespace, done: dict[str, Converted], model: ModelFiles) -> None:
    if options.json:
        files = {name: dataclasses.asdict(converted) for name, converted in done.items()}
        print(json.dumps({"files": files, "left_out": _left_out(model)}))
        return
    for name, converted in done.items():
        ratio = converted.bytes_out / converted.bytes_in
        sizes = f"{_size(converted.bytes_in)} -> {_size(converted.bytes_out)} ({ratio:.1%})"
        print(f"{printable(name)}: {converted.compressed} of {converted.tensors} tensors compressed, {sizes}")
    if not any(converted.compressed for converted in done.values()):
        print("no tensor is compressed: only those of bf16 can be, and only if they are large enough")
    _print_left_out(model)


def _left_out(*models: ModelFiles | None) -> list[str]:
    return [str(path) for model in models if model for path in model.left_out]


def _print_left_out(*models: ModelFiles | None) -> None:
    for model in filter(None, models):
        for path, reason in model.left_out.items():
            print(f"{printable(str(model.root / path))}: left out, as {reason}")


def _verify(options: argparse.Namespace) -> int:
    model, found = _find(options.source), []
    other = None if options.other is None else _find(options.other)
    if other is not None and other.is_folder != model.is_folder:
        raise ValueError("A and B must be two files or two folders")
    for file in model.weights:
        if other is not None and file not in other.weights:
            found.append(f"{file}: missing in {other.root}")
            continue
        with contextlib.ExitStack() as stack:
            one = stack.enter_context(WeightFile(model.root / file, plain=True))
            if other is None and not one.is_compressed:
                raise ValueError(
                    f"{one.path} is an ordinary safetensors file, which has no checksums; compare it with B"
                )
            two = other and stack.enter_context(WeightFile(other.root / file, plain=True))
            found += conversion.differences(one, two, progress=partial(_over_names, one))
    if other is not None:
        found += [f"{file}: missing in {model.root}" for file in other.weights if file not in model.weights]
    if options.json:
        print(json.dumps({"equal": not found, "differences": found, "left_out": _left_out(model, other)}))
    else:
        for line in found[:_SHOWN]:
            print(printable(line))
        if len(found) > _SHOWN:
            print(f"and {len(found) - _SHOWN} more")
        _print_left_out(model, other)
        print("different" if found and other else "damaged" if found else "equal bit for bit" if other else "intact")
    return DIFFERENT if found else OK


def _inspect(options: argparse.Namespace) -> int:
    model = _find(options.source)
    tensors: list[Inspected] = []
    size = 0
    for file in model.weights:
        with WeightFile(model.root / file, plain=True) as weights:
            tensors += [conversion.inspect(weights, name) for name in _over_names(weights, list(weights.records))]
            size += os.path.getsize(model.root / file)
    if options.json:
        print(json.dumps({"bytes": size, "tensors": [_as_json(tensor) for tensor in tensors]}))
    else:
        _print_table(tensors, size)
    return OK


def _as_json(tensor: Inspected) -> dict[str, Any]:
    fields = {**dataclasses.asdict(tensor), "dtype": short_name(tensor.dtype)}
    return {**fields, "bits": tensor.bits}


def _print_table(tensors: list[Inspected], size: int) -> None:
    rows = [
        (
            printable(tensor.name),
            f"{short_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]",
            tensor.form,
            _bits(tensor.bits),
            _bits(tensor.bound),
        )
        for tensor in tensors
    ]
    rows.insert(0, ("tensor", "shape", "stored as", "bits", "bound"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        left = [text.ljust(width) for text, width in zip(row[:3], widths[:3], strict=True)]
        right = [text.rjust(width) for text, width in zip(row[3:], widths[3:], strict=True)]
        print("  ".join([*left, *right]))

    halves = [tensor for tensor in tensors if tensor.bound is not None]
    if count := sum(tensor.numel for tensor in halves):
        bits = 8 * sum(tensor.nbytes for tensor in halves) / count
        bound = sum(tensor.numel * (tensor.bound or 0) for tensor in halves) / count
        shares = f"{bits / 16:.2%} of bf16, where the bound is {bound / 16:.2%}"
        print(f"{count} bf16 weights: {bits:.3f} bits each, bound {bound:.3f} ({shares})")
    print(f"{sum(tensor.numel for tensor in tensors)} elements in {_size(size)}, headers included")


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _size(count: int) -> str:
    return f"{count / 1e6:.3f} MB"


def _over_names(weights: WeightFile, names: Sequence[str]) -> Iterable[str]:
    return with_bar(names, [weights.describe(name)[2] for name in names], Path(weights.path).name)
