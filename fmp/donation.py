"""Giving a state away: the step may free it as it goes, and nobody else can use it again by mistake."""

from typing import Any, NoReturn, TypeVar

from fmp.errors import DonatedStateError

T = TypeVar("T")


class _Donated:
    """What is left of a state that was given away: every use of it raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise DonatedStateError(
            f"this state was given to a donating step, so its {name!r} is gone; use the state that the step returned, "
            "or pass donate=False"
        )

    def __repr__(self) -> str:
        return "<a state that was given to a donating step>"


def check_owned(state: Any, name: str = "this state") -> None:
    """Raises a `DonatedStateError`, which calls the state by its name, if it was given away before."""
    if isinstance(state, _Donated):
        raise DonatedStateError(f"{name} was already given to a donating step; use the state that the step returned")


def give_away(state: T) -> T:
    """Moves the fields of a state into a new object, and leaves the old one unusable.

    Args:
        state: An instance of a dataclass node.

    Returns:
        The new object, the only owner of the fields.

    Raises:
        DonatedStateError: If the state was given away before.
    """
    check_owned(state)
    owner: Any = object.__new__(type(state))
    owner.__dict__.update(state.__dict__)
    state.__dict__.clear()
    object.__setattr__(state, "__class__", _Donated)
    return owner
