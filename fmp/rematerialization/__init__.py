"""Rematerialization: functions whose intermediate values are computed again for the gradient instead of kept."""

from fmp.rematerialization import saveable as saveable
from fmp.rematerialization.naming import checkpoint_name as checkpoint_name
from fmp.rematerialization.sequential import remat_sequential as remat_sequential
from fmp.rematerialization.transform import remat as remat
