"""The public exceptions of fmp. Arguments it refuses raise ValueError, TypeError or KeyError with a path in it."""


class BannedOpError(NotImplementedError):
    """An op was called that the op rules of the active policy refuse.

    No TypeError: Python's operators take one for a reason to try something else, and `x == y` would return False.
    """


class DonatedStateError(RuntimeError):
    """A train state was used after it had been given away to a donating step."""


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, or does not fit the tree it is loaded into."""


class DF11Error(ValueError):
    """A file of compressed weights is incomplete, damaged, or of a kind that this fmp does not read."""


class RematError(RuntimeError):
    """A function given to `fmp.remat` cannot be recomputed to the same gradient, or was not."""
