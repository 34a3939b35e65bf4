"""Trains a tiny language model in bfloat16 with each form of master weights, and prints what each costs and reaches.

python -m tests.bench.master_forms                   # two minutes on one core
python -m tests.bench.master_forms --seeds 3         # the mean of several runs
python -m tests.bench.master_forms --save NAME       # keeps the table under tests/bench/results
"""

import argparse
import json
import platform
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from tqdm import tqdm

import fmp
from fmp import tree
from tests.bench.__main__ import RESULTS, processor
from tests.bench.lm_step import ARGUMENTS

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_lm import GPT, make_policy, make_step, read_text, sample_batch, validation_loss

SHAPE = {"context": 64, "width": 64, "heads": 4, "layers": 2}
FORMS = {
    "f32 masters": {"opt_level": "O2", "master_weights": "f32"},
    "remainder": {"opt_level": "O2", "master_weights": "remainder"},
    "kahan": {"opt_level": "O2", "master_weights": "kahan"},
    "stochastic": {"opt_level": "O2", "master_weights": "stochastic"},
    "plain bf16 (O3)": {"opt_level": "O3", "master_weights": None},
}


@dataclass(frozen=True)
class Row:
    """What one form costs and reaches.

    Attributes:
        bytes_a_parameter: Of parameters and masters together; layers that stay in float32 count with 4.
        losses: The validation loss of each seed, in nats per byte.
    """

    form: str
    bytes_a_parameter: float
    losses: Sequence[float]


def train(options: dict[str, str | None], seed: int, steps: int) -> tuple[float, float]:
    """Trains one model; returns its bytes a parameter and its validation loss."""
    arguments = Namespace(**{**vars(ARGUMENTS), **SHAPE, **options, "seed": seed, "steps": steps, "batch": 16})
    torch.manual_seed(seed)
    text = read_text(None)
    held_out = text[-len(text) // 20 :]
    text = text[: -len(held_out)]
    model = fmp.functionalize(GPT(**SHAPE))
    policy = make_policy(arguments)
    step = make_step(model, policy, arguments)
    state = step.init(model.params, buffers=model.buffers, seed=seed)
    for index in range(steps):
        state, _ = step(state, sample_batch(text, index, arguments))
    loss = validation_loss(fmp.autocast(model.apply, policy), state, held_out, arguments)
    stored = sum(leaf.nbytes for leaf in tree.leaves((state.params, state.master)) if leaf is not None)
    return stored / sum(leaf.numel() for leaf in tree.leaves(state.params)), loss


def measure(form: str, seeds: int, steps: int) -> Row:
    """Trains one form with each seed."""
    runs = [train(FORMS[form], seed, steps) for seed in range(seeds)]
    return Row(form, runs[0][0], [loss for _, loss in runs])


def table(rows: Sequence[Row]) -> str:
    """Writes rows as a Markdown table."""
    lines = ["| form | bytes a parameter | validation loss |", "| --- | ---: | ---: |"]
    lines += [f"| {row.form} | {row.bytes_a_parameter:.2f} | {statistics.mean(row.losses):.4f} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", help="keep the table under tests/bench/results by this name")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    rows = [measure(form, arguments.seeds, arguments.steps) for form in tqdm(FORMS, desc="forms of masters")]
    heading = (
        f"{date.today()}, {processor()}, {arguments.steps} steps, {arguments.seeds} seed(s), "
        f"torch {torch.__version__}, Python {platform.python_version()}, fmp {fmp.__version__}"
    )
    text = f"{heading}\n\n{table(rows)}\n"
    print(f"\n{text}")
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{arguments.save}.md").write_text(text)
        (RESULTS / f"{arguments.save}.json").write_text(
            json.dumps({"heading": heading, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
