"""The state dict of a session: Apex's entries for the loss scalers, and the float32 masters, which Apex loses."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fmp.compat import losses
from fmp.compat.session import Session
from fmp.dtypes import short_name
from fmp.tree import describe

_MASTERS = "masters"


# Apex's type. It has attributes, as the state dict of a module, so that the keys stay Apex's.
StateDict = OrderedDict[str, Any]


def save(session: Session) -> StateDict:
    """Returns the state of a session, see `amp.state_dict`."""
    state: StateDict = OrderedDict()
    vars(state)["_metadata"] = {"opt_level": _level(session)}
    state.update((f"loss_scaler{index}", loss.state_dict()) for index, loss in enumerate(session.losses))
    if session.options.master_weights:
        session.working_tensors()
        state[_MASTERS] = session.master_values()
    return state


@torch.inference_mode(False)
def load(session: Session, state_dict: Mapping[str, Any]) -> None:
    """Restores the state of a session, see `amp.load_state_dict`."""
    unknown = [key for key in state_dict if key != _MASTERS and "loss_scaler" not in key]
    if unknown:
        raise RuntimeError(
            f"state_dict has unexpected keys {', '.join(map(repr, unknown))}; give it what amp.state_dict() returned"
        )
    names = [key for key in state_dict if key != _MASTERS]
    states = [losses.read_state(name, state_dict[name]) for name in names]
    values = state_dict.get(_MASTERS)
    if values is not None:
        _check_masters(values, session.working_tensors())

    saved_at = getattr(state_dict, "_metadata", {}).get("opt_level")
    if saved_at is None and values is not None and not session.options.master_weights:
        saved_at = "a level with master weights"
    if saved_at is not None and saved_at != _level(session):
        session.say(f"Warning: the state dict was saved at {saved_at}, and amp was initialized at {_level(session)}")
    if len(names) != len(session.losses):
        session.say(
            f"Warning: the state dict has {len(names)} loss scalers, and amp was initialized with "
            f"{len(session.losses)}; loading the first {min(len(names), len(session.losses))}"
        )
    for index, (scale, unskipped) in enumerate(states[: len(session.losses)]):
        session.losses[index] = session.losses[index].load(scale, unskipped)
    if values is not None:
        session.set_values(values)


def _level(session: Session) -> str:
    level = session.options.opt_level
    return level if level == "O0" else f"{level} in {short_name(session.options.half)}"


def _check_masters(values: Any, tensors: list[list[Tensor]]) -> None:
    counts = [len(group) for group in values] if isinstance(values, list) else describe(values)
    if counts != [len(group) for group in tensors]:
        raise ValueError(
            f"state_dict[{_MASTERS!r}] must be a list of lists, one an optimizer, of lengths "
            f"{[len(group) for group in tensors]}, got {counts!r}"
        )
    for group, expected in zip(values, tensors, strict=True):
        for value, tensor in zip(group, expected, strict=True):
            if value is not None and (not isinstance(value, Tensor) or value.shape != tensor.shape):
                raise ValueError(f"state_dict[{_MASTERS!r}] has {describe(value)} for {describe(tensor)}")
