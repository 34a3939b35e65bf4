"""The campaign against the readers of DF11: starts the fuzzer, keeps what it finds, and starts it again."""

import base64
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.soak import df11_targets
from tests.soak.report import Report

SECONDS_AN_INPUT = 10
_LINE = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_PRINTED = 4000
# What a fuzzer would take long to spell.
_WORDS = (
    *('"dtype":', '"shape":', '"data_offsets":', '"__metadata__":', '"tensors":', '"tied":', '"structure":'),
    *('"huffman"', '"deflate"', '"raw"', '"BF16"', '"U8"', '"I64"', '"F8_E8M0"', '"BOOL"', '{"list":[', '{"dict":{'),
    *("null", "[]", "{}", "-1", "0.5", "NaN", "9223372036854775807", "18446744073709551615", "1e999"),
    *('"pattern_dict":', ".*", "(?:", "(?=", "{1,3}", "[^", "\\d", "|", "\\u0000"),
)


def campaign(minutes: float, folder: Path | None = None) -> Report:
    """Fuzzes for some minutes.

    Args:
        minutes: How long.
        folder: Where to keep the corpus and what fails; a temporary one by default.

    Returns:
        How many inputs were run, and those that failed, each with what it takes to run it again.
    """
    folder = Path(tempfile.mkdtemp(prefix="fmp-fuzz-")) if folder is None else folder
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(df11_targets.seeds()):
        (corpus / f"seed-{index}").write_bytes(seed)
    quoted = (word.replace("\\", "\\\\").replace('"', '\\"') for word in _WORDS)
    (folder / "words.dict").write_text("".join(f'"{word}"\n' for word in quoted))
    report, start = Report("df11"), time.monotonic()
    while (left := 60.0 * minutes - (time.monotonic() - start)) > 1.0:
        before = set(folder.iterdir())
        text, code = _fuzz(folder, corpus, left)
        counts = [int(count) for count in _LINE.findall(text)]
        report.examples += sum(counts)
        found = sorted(set(folder.iterdir()) - before)
        report.findings += [_described(path, text) for path in found]
        if not found and (code or not counts):
            report.findings.append(f"the fuzzer ended with {code}:\n{text[-_PRINTED:]}")
            break
    report.seconds = time.monotonic() - start
    return report


def replay(path: Path) -> None:
    """Runs one input that was kept; needs no fuzzer.

    Raises:
        Exception: What the input fails with.
    """
    df11_targets.run(path.read_bytes())


def _fuzz(folder: Path, corpus: Path, seconds: float) -> tuple[str, int]:
    options = [
        f"-max_total_time={max(int(seconds), 1)}",
        f"-timeout={SECONDS_AN_INPUT}",
        f"-artifact_prefix={folder}{os.sep}",
        f"-dict={folder / 'words.dict'}",
        "-print_final_stats=1",
        "-rss_limit_mb=4096",
        "-max_len=24000",
        "-len_control=0",
    ]
    command = [sys.executable, "-m", "tests.soak.df11_fuzzer", *options, str(corpus)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return done.stdout, done.returncode


def _described(path: Path, text: str) -> str:
    data = path.read_bytes()
    place = text.find("Uncaught Python exception")
    what = text[max(place, 0) :][:_PRINTED]
    short = f"\n    base64: {base64.b64encode(data).decode()}" if len(data) <= 1000 else ""
    return f"{what.rstrip()}\n    replay: python -m tests.soak df11 --replay {path}{short}"
