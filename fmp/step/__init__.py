"""The train step: a pure function `(state, batch) -> (state, metrics)` composed of the public parts."""

from fmp.step.build import TrainStep as TrainStep, train_step as train_step
from fmp.step.state import Metrics as Metrics, TrainState as TrainState
