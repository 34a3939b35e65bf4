"""Bridges for scripts written for other libraries: `from fmp.compat import amp` in place of `from apex import amp`."""

from fmp.compat import amp as amp
