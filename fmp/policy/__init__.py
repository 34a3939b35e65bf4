"""Precision policies, Apex's opt levels as policies, and casting op by op."""

from fmp.policy.caster import autocast as autocast, casting as casting
from fmp.policy.explaining import explain as explain
from fmp.policy.explanation import Explanation as Explanation
from fmp.policy.op_rules import OpRules as OpRules
from fmp.policy.opt_level import NORM_PATTERNS as NORM_PATTERNS, opt_level as opt_level
from fmp.policy.policy import Policy as Policy
from fmp.policy.regions import (
    full_precision as full_precision,
    low_precision as low_precision,
    promote as promote,
)
