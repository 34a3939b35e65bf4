"""How much memory a training run needs, a call needs, and a gradient keeps."""

from fmp.memory import estimators as estimators
from fmp.memory.activations import Transformer as Transformer
from fmp.memory.measured import Timeline as Timeline, measure_step as measure_step
from fmp.memory.peak import peak as peak
from fmp.memory.plan import plan as plan
from fmp.memory.planned import Plan as Plan
from fmp.memory.residuals import Residual as Residual, Residuals as Residuals, saved_residuals as saved_residuals
