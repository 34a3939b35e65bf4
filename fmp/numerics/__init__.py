"""What number formats do to a training run, measured: what they lose, where it breaks, how two runs differ."""

from fmp.numerics.compare import Comparison as Comparison, compare as compare
from fmp.numerics.differences import LeafDifference as LeafDifference
from fmp.numerics.format_loss import FormatLoss as FormatLoss, loss_in as loss_in
from fmp.numerics.formats import FORMATS as FORMATS, Format as Format, number_format as number_format
from fmp.numerics.histogram import Histogram as Histogram, histogram as histogram
from fmp.numerics.history import History as History
from fmp.numerics.logs import write_jsonl as write_jsonl, write_tensorboard as write_tensorboard
from fmp.numerics.lost_updates import LostUpdates as LostUpdates, lost_updates as lost_updates
from fmp.numerics.magnitudes import Magnitude as Magnitude
from fmp.numerics.nonfinite import find_nonfinite as find_nonfinite
from fmp.numerics.nonfinite_report import (
    NonfiniteReport as NonfiniteReport,
    OpInput as OpInput,
    OpRecord as OpRecord,
)
from fmp.numerics.op_sequence import Parting as Parting
from fmp.numerics.plots import (
    plot_exponents as plot_exponents,
    plot_live_bytes as plot_live_bytes,
    plot_plan as plot_plan,
    plot_scale as plot_scale,
    plot_underflow as plot_underflow,
)
from fmp.numerics.record import Recorded as Recorded, record as record
from fmp.numerics.suggestion import suggest_scale as suggest_scale
from fmp.numerics.watch import WatchState as WatchState, watch_gradients as watch_gradients

__all__ = [
    "FORMATS",
    "Comparison",
    "Format",
    "FormatLoss",
    "Histogram",
    "History",
    "LeafDifference",
    "LostUpdates",
    "Magnitude",
    "NonfiniteReport",
    "OpInput",
    "OpRecord",
    "Parting",
    "Recorded",
    "WatchState",
    "compare",
    "find_nonfinite",
    "histogram",
    "loss_in",
    "lost_updates",
    "number_format",
    "plot_exponents",
    "plot_live_bytes",
    "plot_plan",
    "plot_scale",
    "plot_underflow",
    "record",
    "suggest_scale",
    "watch_gradients",
    "write_jsonl",
    "write_tensorboard",
]
