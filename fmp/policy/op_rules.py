"""Op rules: which torch functions run in low precision, which in full, which promote, and which are refused."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from fmp.policy import oplists
from fmp.policy.spellings import name_of

Op = Callable[..., Any] | str
Kind = Literal["low", "full", "promote", "banned", "leave"]


class Rule(NamedTuple):
    """What happens to an op.

    Attributes:
        kind: `"low"` casts floating-point arguments to the policy's compute dtype, `"full"` to float32, `"promote"` to
            the widest dtype among them. `"banned"` raises, `"leave"` does nothing.
        why: Where the rule comes from, or why the op is banned.
        always: Whether a banned op raises whatever its arguments, or only if one of them has fewer than 32 bits.
    """

    kind: Kind
    why: str
    always: bool = False


@dataclasses.dataclass(frozen=True)
class OpRules:
    """Says op by op what to cast, for `fmp.Policy(op_rules=...)`.

    Immutable: each method returns new rules. Naming one spelling of an op (`torch.mm`, `torch.Tensor.mm`,
    `torch.nn.functional.softmax`, `operator.matmul`, `torch.ops.aten.mm`, `"mm"`) names all of them, in-place ones and
    `out=` included. An op without a rule runs on what it is given.

    What runs in place, or writes into `out=`, keeps the dtype of what it changes: the other arguments are cast to
    that. An op that belongs in full precision refuses to change a 16-bit tensor. With an explicit `dtype=`, an op
    that belongs in full precision is left alone.

    Attributes:
        base: The lists to start from: `"apex"`, `"torch"` or `""` for none.
        changes: What was changed since, in order.

    Example:
        >>> rules = OpRules.apex().full(torch.relu).low("einsum")
        >>> rules.rule(torch.nn.functional.relu)
        Rule(kind='full', why='your rule', always=False)
        >>> rules.rule("softmax").kind, rules.rule(torch.Tensor.matmul).kind, rules.rule("sigmoid")
        ('full', 'low', None)
    """

    base: Literal["", "apex", "torch"] = ""
    changes: tuple[tuple[str, Rule], ...] = ()

    def __post_init__(self):
        if not isinstance(self.base, str) or self.base not in _BASES:
            raise ValueError(f"base must be one of {', '.join(map(repr, _BASES))}, got {self.base!r}")
        for change in self.changes:
            if not isinstance(change, tuple) or len(change) != 2 or not isinstance(change[1], Rule):
                raise TypeError(f"changes must be pairs of a name and a Rule, got {change!r}; use low(), full(), ...")
            if change[1].kind not in ("low", "full", "promote", "banned", "leave"):
                raise ValueError(f"{change[0]}: a rule cannot be of kind {change[1].kind!r}")

    @classmethod
    def apex(cls) -> "OpRules":
        """Returns NVIDIA Apex's O1 lists, with additions for what came after Apex; docs/casting.md names them.

        float64 arguments are cast like float32 ones.
        """
        return cls("apex")

    @classmethod
    def torch(cls) -> "OpRules":
        """Returns the lists of `torch.autocast` on CUDA.

        As there, float64 arguments are left alone, and so is what runs in place or with `out=`.
        """
        return cls("torch")

    def low(self, *ops: Op) -> "OpRules":
        """Runs these ops in the policy's compute dtype.

        Args:
            *ops: The ops, by any of their spellings.

        Returns:
            The new rules.

        Raises:
            TypeError: If there is none, or one is something that a `TorchFunctionMode` is never shown.
            ValueError: If torch has no op of a name.
        """
        return self._with(ops, Rule("low", "your rule"))

    def full(self, *ops: Op) -> "OpRules":
        """Runs these ops in float32; also what makes a banned op allowed. See `low`."""
        return self._with(ops, Rule("full", "your rule"))

    def promote(self, *ops: Op) -> "OpRules":
        """Runs these ops in the widest dtype among their floating-point arguments, 0-dim ones included. See `low`."""
        return self._with(ops, Rule("promote", "your rule"))

    def leave(self, *ops: Op) -> "OpRules":
        """Takes these ops off every list. See `low`."""
        return self._with(ops, Rule("leave", "your rule"))

    def banned(self, op: Op, why: str, *, always: bool = False) -> "OpRules":
        """Makes an op raise `fmp.BannedOpError`.

        Args:
            op: The op, by any of its spellings.
            why: The reason, and what to use instead; it becomes the message.
            always: Raise whatever the arguments, not only if one of them has fewer than 32 bits.

        Returns:
            The new rules.

        Raises:
            TypeError: If `why` is no text or empty, `always` is no bool, or `op` is something that a
                `TorchFunctionMode` is never shown.
            ValueError: If torch has no op of that name.
        """
        if not isinstance(why, str) or not why:
            raise TypeError(f"banned() needs a reason, which becomes the message, got why={why!r}")
        if not isinstance(always, bool):
            raise TypeError(f"banned(): always must be True or False, got {always!r}")
        return self._with((op,), Rule("banned", why, always))

    def rule(self, op: Op) -> Rule | None:
        """Looks up the rule of an op; None if it has none.

        Raises:
            TypeError: If `op` is something that a `TorchFunctionMode` is never shown.
            ValueError: If torch has no op of that name.
        """
        return table(self).get(name_of(op))

    @property
    def casts_float64(self) -> bool:
        """Whether float64 arguments are cast."""
        return self.base != "torch"

    @property
    def casts_in_place(self) -> bool:
        """Whether what runs in place or with `out=` has its other arguments cast."""
        return self.base != "torch"

    def _with(self, ops: tuple[Op, ...], rule: Rule) -> "OpRules":
        if not ops:
            raise TypeError(f"{rule.kind}() needs at least one op, such as torch.mm or 'softmax'")
        return dataclasses.replace(self, changes=(*self.changes, *[(name_of(op), rule) for op in ops]))


def table(rules: OpRules) -> Mapping[str, Rule]:
    """Returns the rule of each op that has one, by its name."""
    return _table(rules)


@functools.lru_cache(maxsize=64)
def _table(rules: OpRules) -> Mapping[str, Rule]:
    found = dict(_BASES[rules.base]())
    for name, rule in rules.changes:
        found.pop(name, None)
        if rule.kind != "leave":
            found[name] = rule
    return found


def _apex() -> Mapping[str, Rule]:
    listed = {"low": oplists.APEX_LOW, "full": oplists.APEX_FULL, "promote": oplists.APEX_PROMOTE}
    why = "it needs full-precision input; use binary_cross_entropy_with_logits, or allow it with OpRules.full(...)"
    return _rules("Apex's list", listed, oplists.APEX_ADDED) | {
        name: Rule("banned", why) for name in oplists.APEX_BANNED
    }


def _torch() -> Mapping[str, Rule]:
    listed = {"low": oplists.TORCH_LOW, "full": oplists.TORCH_FULL, "promote": oplists.TORCH_PROMOTE}
    why = "torch.autocast refuses it too; use binary_cross_entropy_with_logits, or allow it with OpRules.full(...)"
    return _rules("torch's list", listed, oplists.TORCH_INSIDE) | {
        name: Rule("banned", why, always=True) for name in oplists.TORCH_BANNED
    }


def _rules(
    why: str, listed: Mapping[str, tuple[str, ...]], added: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    kinds: tuple[Kind, ...] = ("low", "full", "promote")
    for kind in kinds:
        for reason, names in added.get(kind, {}).items():
            rules |= {name: Rule(kind, reason) for name in names}
        rules |= {name: Rule(kind, why) for name in listed[kind]}
    return rules


_BASES: Mapping[str, Callable[[], Mapping[str, Rule]]] = {"": dict, "apex": _apex, "torch": _torch}
