"""What takes the place of the values of a call while it runs with other tensors: made anew, or swapped in modules."""

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fmp import _compat, tree
from fmp.errors import RematError
from fmp.rematerialization.snapshot import refuse_escaped

# Makes a value anew around other tensors.
Rebuild = Callable[[Sequence[Tensor], "Made"], Any]


class Place(NamedTuple):
    """Where a module keeps a tensor: one of its dictionaries, the key there, and the slot of the tensor.

    For an attribute that holds tensors, such as a list of them, `rebuild` makes it anew, and there is no slot.
    `is_computed` says that the module sets it whenever it is called, without a look at what was there.
    """

    table: dict[str, Any]
    key: str
    name: str
    slot: int = -1
    rebuild: Rebuild | None = None
    is_computed: bool = False


class Made:
    """What was made anew for one call: what occurs twice is made once, since functions may call each other.

    Attributes:
        values: By the id of the original.
        containers: The containers among them, each with what was put into it.
        cells: The closure variables of the functions among them, likewise.
        scopes: The global variables that these functions set, likewise.
    """

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.containers: list[tuple[Any, list[Any]]] = []
        self.cells: list[tuple[types.CellType, Any, str]] = []
        self.scopes: list[tuple[dict[str, Any], Any, str]] = []

    def check(self) -> None:
        """Refuses tensors that the function put into these: nobody but the function has them.

        Raises:
            RematError: If there is one, naming where.
        """
        for container, filled in self.containers:
            given = {id(leaf) for leaf in filled}
            for leaf in tree.leaves(container):
                if id(leaf) not in given:
                    refuse_escaped(leaf, f"a {type(container).__name__} that it was given")
        for cell, value, name in self.cells:
            if cell.cell_contents is not value:
                refuse_escaped(cell.cell_contents, f"the variable {name!r}")
        for scope, value, name in self.scopes:
            if scope.get(name) is not value:
                refuse_escaped(scope.get(name), f"the global variable {name!r}")


def check_places(places: Sequence[Place], values: Sequence[Any]) -> None:
    """Checks that places still hold what was put there.

    Raises:
        RematError: If one does not.
    """
    for place, value in zip(places, values, strict=True):
        if place.table.get(place.key) is not value and not place.is_computed:
            raise RematError(
                f"remat: the function gave the module's {place.name} a new value, which a recomputation would do "
                "twice; return the value instead, for example with fmp.functionalize(module).apply"
            )


class Unset:
    """Stands where a module will set a tensor; what reads it before raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Raises."""
        cls._refuse()

    def __getattr__(self, name: str) -> Any:
        """Raises."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise RematError(
            "remat: the function reads a weight that a hook sets when its module is called, such as that of "
            "torch.nn.utils.weight_norm or prune, but does not call the module before; pass the weight as an argument"
        )


UNSET: Any = Unset()


def computed_at_each_call(module: nn.Module) -> frozenset[str]:
    """Lists the attributes of a module that torch sets whenever it is called."""
    # A recurrent layer notices when they are stale.
    of_rnn = _compat.FLAT_WEIGHTS if isinstance(module, nn.RNNBase) else frozenset()
    hooks = module._forward_pre_hooks.values()
    return of_rnn.union(
        [hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)],
        [hook.name for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)],
    )
