"""`fmp.explain`: runs a function once and tells which op ran in which precision, and why."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fmp import _compat
from fmp.dtypes import short_name
from fmp.live_memory import uncompiled
from fmp.policy.caster import autocast
from fmp.policy.explanation import Explanation
from fmp.policy.op_rules import OpRules
from fmp.policy.places import Arguments
from fmp.policy.policy import Policy
from fmp.policy.recording import Recorder, function_name


def explain(
    fn: Callable[..., Any], *args: Any, policy: Policy | None = None, show: bool = True, **kwargs: Any
) -> Explanation:
    """Runs a function once, and prints and returns which op ran in which precision, and why.

    Each kind of call has a row: the op, its rule, where the rule comes from, the dtypes of the arguments before and
    after they were cast, those that came out, where it ran, which argument of `fn` it took, and how often. Equal layers
    share rows, with a star for their number. Left out is what computes no floating-point numbers: views, and what only
    creates or moves them; and so is what fmp itself computes outside of a policy with op rules, such as the update of
    an optimizer. Backward passes run in the dtypes of the forward pass, and have no rows.

    Warnings follow: ops without a rule that got mixed dtypes, float64 that nobody asked for or that a rule took away,
    casts that the next op undoes, and tensors cast again at each use because they are closed over. docs/casting.md
    explains the table.

    Args:
        fn: Any function, an `nn.Module`, `Model.apply`, or a train step. What was compiled before the call runs eagerly
            inside of it.
        *args: Its arguments.
        policy: Runs `fmp.autocast(fn, policy)`. None runs `fn` as it is, and explains the policies at work inside, such
            as that of a `fmp.train_step`.
        show: Whether to print.
        **kwargs: Further arguments of `fn`. For one that is called `policy` or `show`, wrap `fn`.

    Returns:
        The explanation; `str()` of it is what is printed, and `.output` what `fn` returned.

    Raises:
        TypeError: If `fn` cannot be called.
        ValueError: If `fn` is compiled.
        Exception: What `fn` raises, such as `BannedOpError`. The table up to there is added to its message as a note.

    Example:
        >>> def attend(x, w):
        ...     return (x @ w).softmax(-1)
        >>> policy = fmp.opt_level("O1", half_dtype=torch.bfloat16)
        >>> explanation = explain(attend, torch.ones(2, 2), torch.ones(2, 2), policy=policy)
        attend under params=f32,compute=bf16,output=f32,ops=apex
        op       rule  why          in    ran   out   where  operand  calls
        matmul   low   Apex's list  f32   bf16  bf16  ...    w            1
        softmax  full  Apex's list  bf16  f32   f32   ...                 1
        2 calls: 1 low, 1 full
        >>> explanation.rows[0].dtypes_ran
        (torch.bfloat16, torch.bfloat16)
    """
    if not callable(fn):
        raise TypeError(f"explain runs a function, got {fn!r}")
    if _is_compiled(fn):
        raise ValueError(
            f"{function_name(fn)} is compiled, so it cannot be watched; explain it without torch.compile or "
            "compile=True, the dtypes are the same"
        )
    arguments = Arguments(fn, args, kwargs)
    recorder = Recorder(arguments, explain.__code__)
    run = fn if policy is None else autocast(fn, policy)

    def explanation(output: Any = None) -> Explanation:
        return Explanation(_title(fn, policy, recorder.policies), recorder.rows(), recorder.hazards.warnings(), output)

    try:
        with uncompiled(), recorder:
            output = run(*args, **kwargs)
    except Exception as error:
        error.add_note(str(explanation()))
        raise
    found = explanation(output)
    if show:
        print(found)
    return found


def _is_compiled(fn: Any) -> bool:
    parts = (fn, getattr(fn, "advance", None))  # the second is where a train step keeps its algorithm
    return any(_compat.is_compiled(part) for part in parts)


def _title(fn: Any, policy: Policy | None, inside: Mapping[tuple[OpRules, torch.dtype], None]) -> str:
    if policy is not None:
        return f"{function_name(fn)} under {_described(policy)}"
    rules = " and ".join(f"{_listed(rules)} with {short_name(low)}" for rules, low in inside)
    return f"{function_name(fn)} as it is" + (f", inside it {rules}" if rules else "")


def _described(policy: Policy) -> str:
    rules = policy.op_rules
    if rules is None or (rules.base and not rules.changes):
        return str(policy)
    return f"{replace(policy, op_rules=None)},{_listed(rules)}"


def _listed(rules: OpRules) -> str:
    return f"ops={rules.base or 'none'}" + (f" and {len(rules.changes)} of your own" if rules.changes else "")
