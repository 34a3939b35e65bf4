"""How much memory a call needs, and what it would keep for its gradient."""

from fmp.memory.peak import peak as peak
from fmp.memory.residuals import Residual as Residual, Residuals as Residuals, saved_residuals as saved_residuals
