"""Precision policies, and Apex's opt levels as policies."""

from fmp.policy.opt_level import NORM_PATTERNS, opt_level
from fmp.policy.policy import Policy

__all__ = ["NORM_PATTERNS", "Policy", "opt_level"]
