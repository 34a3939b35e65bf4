"""Pictures of numbers and of memory, each one function that returns a matplotlib figure."""

from fmp.numerics.plots.exponents import plot_exponents as plot_exponents
from fmp.numerics.plots.memory import plot_live_bytes as plot_live_bytes, plot_plan as plot_plan
from fmp.numerics.plots.timeline import plot_scale as plot_scale, plot_underflow as plot_underflow
