"""Long random runs, by hand: whole programs against float64, and the readers of DF11 under a fuzzer.

python -m tests.soak programs --minutes 10
python -m tests.soak df11 --minutes 10                    # needs `pip install atheris`
python -m tests.soak programs --replay "Program(...)"     # what a finding prints
python -m tests.soak df11 --replay FILE
"""

import argparse
from pathlib import Path

import torch

from tests.soak import campaign, df11
from tests.soak.program import Program


def main() -> int:
    """Runs what the command line says; returns the exit code, 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["programs", "df11"])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round of programs")
    parser.add_argument("--keep", type=Path, help="the folder for the fuzzer's corpus and findings")
    parser.add_argument("--replay", help="a program as a finding prints it, or a file that the fuzzer kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.replay is not None:
        if arguments.what == "df11":
            df11.replay(Path(arguments.replay))
        else:
            campaign.run(eval(arguments.replay, {"Program": Program}))
        print("passes")
        return 0
    if arguments.what == "df11":
        report = df11.campaign(arguments.minutes, arguments.keep)
    else:
        report = campaign.campaign(arguments.minutes, seed=arguments.seed)
    print(report)
    return 1 if report.findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
