"""The exceptions that fmp defines; everything else is a ValueError, TypeError or KeyError with a path in it."""


class DonatedStateError(RuntimeError):
    """A train state was used after it had been given away to a donating step."""


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, or does not fit the tree it is loaded into."""
