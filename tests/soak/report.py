"""What a campaign prints at its end."""

import dataclasses
import platform
from datetime import date
from pathlib import Path

import torch


@dataclasses.dataclass
class Report:
    """How much was run, and what was found.

    Attributes:
        name: Of the campaign.
        examples: How many examples were run.
        seconds: How long it took.
        findings: What failed, each with what it takes to run it again.
    """

    name: str
    examples: int = 0
    seconds: float = 0.0
    findings: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"finding {index}: {finding}" for index, finding in enumerate(self.findings, start=1)]
        machine = f"{_processor()}, {torch.get_num_threads()} thread(s), Python {platform.python_version()}"
        lines.append(
            f"{self.name}: {self.examples} examples in {self.seconds:.0f} s, {len(self.findings)} finding(s); "
            f"{date.today()}, {machine}, torch {torch.__version__}"
        )
        return "\n".join(lines)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
