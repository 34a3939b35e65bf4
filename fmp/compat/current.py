"""What `amp.initialize` has begun: Apex's functions take no session, so there is one a process."""

from fmp.compat.session import Session


class Current:
    """The session of this process.

    Attributes:
        session: The session; None before and after, and where amp is switched off.
        is_disabled: Whether amp was initialized with `enabled=False`.
    """

    session: Session | None = None
    is_disabled: bool = False


current = Current()


def the_session(function: str) -> Session | None:
    """Returns the session; None if amp is switched off.

    Args:
        function: Who asks.

    Raises:
        RuntimeError: If amp is not initialized.
    """
    if current.session is None and not current.is_disabled:
        raise RuntimeError(f"amp.{function}: amp is not initialized; call amp.initialize before")
    return current.session
