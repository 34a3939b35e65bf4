"""The laws that fmp holds its own parts to, for parts of one's own: checks, and the hypothesis strategies under them.

Not loaded by `import fmp`: it needs hypothesis, which the extra `testing` brings.
"""

import importlib.util

if importlib.util.find_spec("hypothesis") is None:
    raise ImportError(
        "fmp.testing needs hypothesis, which is not installed: `pip install hypothesis`, or from a clone of fmp "
        "`pip install '.[testing]'`"
    )

from fmp.testing import strategies as strategies
from fmp.testing.invariants import meanings
from fmp.testing.loss_scale import LAWS as _LOSS_SCALE_LAWS, check_loss_scale as check_loss_scale
from fmp.testing.optimizer import LAWS as _OPTIMIZER_LAWS, check_optimizer as check_optimizer
from fmp.testing.pure import LAWS as _PURE_LAWS, check_pure as check_pure

INVARIANTS: dict[str, dict[str, str]] = {
    "check_loss_scale": meanings(_LOSS_SCALE_LAWS),
    "check_optimizer": meanings(_OPTIMIZER_LAWS),
    "check_pure": meanings(_PURE_LAWS),
}
"""What each check makes sure of: by check, the name of each invariant and one line that says what it means."""

__all__ = ["INVARIANTS", "check_loss_scale", "check_optimizer", "check_pure", "strategies"]
