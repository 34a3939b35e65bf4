"""Plants one small bug at a time in the kernels, and says which of them the tests do not notice.

    python -m tests.kernels.mutate [adam.cu ...]

A survivor is either equivalent (it changes nothing that can be seen) or tells which input the tests lack. It takes some
minutes, so it is no test itself.
"""

import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from fmp.kernels import source
from tests.cuda_executor.build import build
from tests.kernels import (
    harness,
    test_adam,
    test_axpby,
    test_df11,
    test_df11_published,
    test_loss_scale,
    test_remainder,
    test_scale,
    test_sgd,
    test_stochastic,
)

SOURCES = ("scale", "axpby", "adam", "sgd", "loss_scale", "df11", "df11_published")
TESTS = {
    "types.cuh": ["scale", "axpby", "adam"],
    "chunks.cuh": ["scale", "axpby", "adam"],
    "factors.cuh": ["scale", "adam", "sgd"],
    "reduce.cuh": ["scale"],
    "parameters.cuh": ["adam", "remainder", "stochastic"],
    "random.cuh": ["stochastic"],
    **{f"{name}.cu": [name] for name in SOURCES},
    **{f"{name}.cu": [name, "remainder", "stochastic"] for name in ("adam", "sgd")},
}
# Which kernels a test runs, if they are not in the source of its own name.
RUNS = {"remainder": ["adam", "sgd"], "stochastic": ["adam", "sgd"]}
FILES = {
    module.__name__.rpartition("test_")[2]: str(module.__file__)
    for module in (
        *(test_adam, test_axpby, test_df11, test_df11_published, test_loss_scale),
        *(test_remainder, test_scale, test_sgd, test_stochastic),
    )
}
# Drawn and long inputs are left out: what only they notice, a chosen input should.
LEFT_OUT = "not any_mix and not any_rule and not long"

RULES = [
    (r" < ", " <= "),
    (r" < ", " > "),
    (r" > ", " >= "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r" \* ", " / "),
    (r" / ", " * "),
    (r" % ", " / "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r" & ", " | "),
    (r" \| ", " & "),
    (r" \^ ", " & "),
    (r" \^ ", " | "),
    (r" \^= ", " = "),
    (r" \*= ", " = "),
    (r" \|= ", " = "),
    (r" \+= ", " -= "),
    (r"(?<=[ (])!(?=[\w*(])", ""),
    (r"(?<=[ (,-])-(?=[a-z])", ""),
    (r"(?<![\w.])0(?=[,;) ])", "1"),
    (r"(?<![\w.])1(?=[,;) >u])", "2"),
    (r"\b0\.0f?\b", "1.0f"),
    (r"\b1\.0f\b", "2.0f"),
    (r"\b0\.5f\b", "0.25f"),
    (r"\b4(?=[,>])", "2"),
    (r"\b16\b", "8"),
    (r"\b32\b", "16"),
    (r"\b253u", "254u"),
    (r"\b255u", "127u"),
    (r"0x7fffffu\b", "0x3fffffu"),
    (r"0x7fffu\b", "0x8000u"),
    (r"0x8000u", "0x7fffu"),
    (r"\b0x[0-9a-f]{7}([0-9a-f])u", r"0x1234567\1u"),
    (r"\b0x1p(\d+)f", r"0x1p1\1f"),
    (r"\bmin\(", "max("),
    (r"\bmax\(", "min("),
    (r"\bfloorf\(", "rintf("),
    (r"~", ""),
    (r"here\.(?:first|row)\b", "0"),
    (r"\bfmaf\(", "unfused("),
    (r"__syncthreads_or\((\w+)\)", r"\1"),
    (r"threadIdx\.x", "(threadIdx.x ^ 1)"),
    (r"\bblockDim\.x", "(blockDim.x / 2)"),
    (r"\? (.+?) : (.+?)(?=[;,)])", r"? \2 : \1"),
    (r"^ *(?:store|form\.write)\(.*;", ";"),
]
PRELUDE = "__device__ __forceinline__ float unfused(float a, float b, float c) { return a * b + c; }\n"


class Mutant(NamedTuple):
    """One file with one bug."""

    file: str
    line: int
    before: str
    after: str
    text: str


def mutants(file: Path) -> Iterator[Mutant]:
    text = file.read_text()
    for pattern, replacement in RULES:
        for found in re.finditer(pattern, text, re.MULTILINE):
            start = text.rfind("\n", 0, found.start()) + 1
            line = text[start : text.find("\n", start)]
            code = line.split("//")[0]
            if found.start() - start >= len(code) or re.match(r"\s*(#|asm|template|enum)", line):
                continue
            if "asm(" in line or "alignas" in line:
                continue
            after = found.expand(replacement)
            changed = PRELUDE + text[: found.start()] + after + text[found.end() :]
            yield Mutant(file.name, text.count("\n", 0, start) + 1, line.strip(), after.strip() or "nothing", changed)


def verdict(mutant: Mutant) -> str:
    """Tests a mutant in a process of its own, which inherits torch and the tests, already loaded."""
    with tempfile.TemporaryDirectory() as folder:
        for file in source.folder().iterdir():
            shutil.copy(file, folder)
        (Path(folder) / mutant.file).write_text(mutant.text)
        names = TESTS[mutant.file]
        try:
            for stem in {stem for name in names for stem in RUNS.get(name, [name])}:
                build(Path(folder) / f"{stem}.cu", "checked")
        except RuntimeError:
            return "does not compile"
        child = os.fork()
        if child == 0:
            os.environ["FMP_TEST_CUDA"] = folder
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            tests = [FILES[name] for name in names]
            code = pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-k", LEFT_OUT, *tests])
            os._exit(code)
        _, status = os.waitpid(child, 0)
        return "survived" if status == 0 else "killed"


def report(chosen: Sequence[str]) -> None:
    if unknown := set(chosen) - TESTS.keys():
        raise SystemExit(f"no such source: {', '.join(sorted(unknown))}; there are {', '.join(sorted(TESTS))}")
    counts: Counter[str] = Counter()
    for file in sorted(harness.folder().iterdir()):
        if file.name not in TESTS or (chosen and file.name not in chosen):
            continue
        if verdict(Mutant(file.name, 0, "", "", file.read_text())) != "survived":
            raise SystemExit(f"the tests of {file.name} fail as it is")
        for mutant in mutants(file):
            found = verdict(mutant)
            counts[found] += 1
            if found == "survived":
                print(f"{mutant.file}:{mutant.line}: {mutant.after!r} in {mutant.before}", flush=True)
        print(f"up to {file.name}: {dict(counts)}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as libraries:
        tempfile.tempdir = libraries  # where the executor keeps what it builds
        report(sys.argv[1:])
