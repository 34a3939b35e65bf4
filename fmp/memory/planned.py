"""What `fmp.memory.plan` returns: bytes by kind, and the table that says what was counted and what not."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fmp.memory.measured import Timeline
from fmp.memory.units import in_unit

KINDS = (
    "params",
    "compute",
    "masters",
    "gradients",
    "accumulators",
    "moments",
    "average",
    "buffers",
    "activations",
    "other",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The bytes on each device, by kind; `str` makes a table of them.

    Attributes:
        numbers: How many parameters there are, in numbers.
        params: The parameters as stored.
        compute: Copies of them in the dtype to compute in.
        masters: What is kept beside them for the optimizer.
        gradients: The gradients as the backward pass makes them.
        accumulators: The sums of the gradients of several microbatches.
        moments: What the optimizer keeps for each number.
        average: The moving average of the parameters.
        buffers: The buffers of the module.
        activations: What the forward pass keeps for the backward pass.
        other: Counts and other scalars of the optimizer.
        optimizer: The optimizer, in words.
        policy: The policy, in words.
        zero: The ZeRO stage.
        devices: How many devices there are.
        unit: What `str` prints: `"GB"`, 10^9 bytes, or `"GiB"`, 2^30.
        texts: What was counted, in words, by kind; and for `"measured peak"` what the measured step is.
        missing: What was not counted.
        timeline: What was measured on fake tensors, if it was.
    """

    numbers: int
    params: int
    compute: int
    masters: int
    gradients: int
    accumulators: int
    moments: int
    average: int
    buffers: int
    activations: int
    other: int
    optimizer: str
    policy: str
    zero: int
    devices: int
    unit: str
    texts: Mapping[str, str]
    missing: tuple[str, ...]
    timeline: Timeline | None = None

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes by kind, in the order of `KINDS`."""
        return {kind: getattr(self, kind) for kind in KINDS}

    @property
    def total(self) -> int:
        """The sum over the kinds. A peak may be less, since not all are there at once, or more; see `timeline`."""
        return sum(self.bytes.values())

    @property
    def title(self) -> str:
        """What the plan is for."""
        parts = [f"{self.numbers:,} parameters", self.optimizer, self.policy]
        if self.devices > 1 or self.zero:
            parts.append(f"ZeRO {self.zero} on {self.devices} device{'s' if self.devices > 1 else ''}")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Returns what the table shows, for JSON: bytes, and words."""
        measured = None
        if self.timeline is not None:
            text = self.texts.get("measured peak", "")
            measured = {"peak": self.timeline.peak, "at_peak": self.timeline.at_peak, "counted": text}
        return {
            "title": self.title,
            "optimizer": self.optimizer,
            "policy": self.policy,
            "numbers": self.numbers,
            "zero": self.zero,
            "devices": self.devices,
            "bytes": self.bytes,
            "total": self.total,
            "counted": {kind: text for kind, text in self.texts.items() if self.bytes.get(kind)},
            "missing": list(self.missing),
            "measured": measured,
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Lists the rows of the table: kind, size, bytes a number, and what was counted; the first has the headings."""
        found = [("kind", self.unit, "bytes a number", "counted")]
        for kind, nbytes in (*self.bytes.items(), ("total", self.total)):
            if nbytes or kind == "total":
                each = f"{nbytes / self.numbers:.3f}" if self.numbers else "-"
                found.append((kind, in_unit(nbytes, self.unit), each, self.texts.get(kind, "")))
        if self.timeline is not None:
            peak = self.timeline.peak
            text = self.texts.get("measured peak", "")
            found.append(("measured peak", in_unit(peak, self.unit), f"{peak / max(self.numbers, 1):.3f}", text))
        return found

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.title}; on each device"]
        for kind, size, each, text in rows:
            lines.append(f"{kind:<{widths[0]}}  {size:>{widths[1]}}  {each:>{widths[2]}}  {text}".rstrip())
        return "\n".join([*lines, f"not counted: {'; '.join(self.missing)}"])
