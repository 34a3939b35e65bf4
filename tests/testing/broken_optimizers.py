"""Optimizers that differ from a good one in one place, each of which breaks a law."""

import torch

from fmp import optim, tree
from fmp.dtypes import is_castable

GOOD = optim.sgd(0.1, momentum=0.9)


def changed(update=None, init=None):
    """Makes an optimizer that differs from a good one in what its functions return."""

    def new_update(grads, state, params):
        found = GOOD.update(grads, state, params)
        return found if update is None else update(*found, grads, state, params)

    def new_init(params):
        state = GOOD.init(params)
        return state if init is None else init(state, params)

    return optim.GradientTransformation(new_init, new_update)


def each(fn):
    return lambda of: tree.map(lambda leaf: fn(leaf) if is_castable(leaf) else leaf, of)


def narrow_moments():
    return changed(init=lambda state, params: tree.cast(state, torch.bfloat16))


def moments_as_parameters():
    return changed(init=lambda state, params: tree.replace(state, momentum=each(torch.zeros_like)(params)))


def widening():
    return changed(lambda updates, state, *given: (updates, tree.cast(state, torch.float64)))


def narrow_updates():
    return changed(lambda updates, state, *given: (tree.cast(updates, torch.bfloat16), state))


def scalar_updates():
    return changed(lambda updates, state, *given: (each(torch.sum)(updates), state))


def no_holes():
    fill = lambda update, param: torch.zeros(param.shape) if update is None and is_castable(param) else update
    return changed(lambda updates, state, grads, old, params: (tree.map(fill, updates, params), state))


def forgetful():
    """Lets the moments of a leaf decay although it has no gradient."""
    return changed(lambda updates, state, *given: (updates, each(lambda leaf: leaf * 0.5)(state)))


def needs_a_leaf():
    def update(updates, state, *given):
        norms = torch.stack([leaf.sum() for leaf in tree.leaves(updates) if leaf is not None])
        return updates, tree.replace(state, count=state.count + norms.isnan().any())

    return changed(update)


def in_place():
    """Writes its moments into the old state."""

    def update(updates, new_state, grads, state, params):
        tree.map(lambda old, new: old.copy_(new) if is_castable(old) else old, state, new_state)
        return updates, new_state

    return changed(update)


def noisy():
    return changed(lambda updates, state, *given: (each(lambda leaf: leaf * torch.rand(()))(updates), state))


def shared_result():
    return changed(lambda updates, state, *given: (state.momentum, state))


def shared_state():
    view = lambda leaf: leaf[...] if is_castable(leaf) else None
    return changed(init=lambda state, params: tree.replace(state, momentum=tree.map(view, params)))


def host_bound():
    def update(updates, state, grads, old, params):
        return each(lambda leaf: leaf * (2.0 if leaf.sum() > 0 else 1.0))(updates), state

    return changed(update)


def counting():
    """Counts in Python, so that each step compiles anew."""

    def update(grads, state, params):
        updates, inner = GOOD.update(grads, state["inner"], params)
        return updates, {"inner": inner, "count": state["count"] + 1}

    return optim.GradientTransformation(lambda params: {"inner": GOOD.init(params), "count": 0}, update)


def cut_off():
    return changed(lambda updates, state, *given: (each(torch.Tensor.detach)(updates), state))


def rooted():
    root = lambda update, grad: None if grad is None else update * (grad * grad).sqrt()
    return changed(lambda updates, state, grads, *given: (tree.map(root, updates, grads), state))


def half_steps():
    """Computes its step in the dtype of the parameter, then widens it."""
    narrow = lambda update, param: update.to(param.dtype).to(update.dtype) if is_castable(update) else None
    return changed(lambda updates, state, grads, old, params: (tree.map(narrow, updates, params), state))


def half_gradients():
    """Rounds gradients to the dtype of their parameters first."""

    def update(grads, state, params):
        return GOOD.update(tree.map(lambda g, p: None if g is None else g.to(p.dtype), grads, params), state, params)

    return optim.GradientTransformation(GOOD.init, update)


def always_half():
    narrow = each(lambda leaf: leaf.bfloat16().to(leaf.dtype))
    return changed(lambda updates, state, *given: (narrow(updates), state))


def in_place_on_half():
    """Clips its gradients in place where they are float16."""

    def update(grads, state, params):
        for grad in tree.leaves(grads):
            if grad is not None and grad.dtype == torch.float16:
                grad.clamp_(-0.5, 0.5)
        return GOOD.update(grads, state, params)

    return optim.GradientTransformation(GOOD.init, update)


def unnamed(fading):
    """Keeps its moments in a tuple, where their place does not say which parameter they belong to."""

    def init(params):
        count = torch.zeros((), dtype=torch.float32)
        return count, tuple(tree.leaves(GOOD.init(params).momentum))

    def update(grads, state, params):
        count, moments = state
        kept = lambda old: old * 0.9 if fading and old is not None else old
        rate, new, updates = 0.1 / (count + 1), [], []
        for grad, old in zip(tree.leaves(grads), moments, strict=True):
            new.append(kept(old) if grad is None else 0.9 * old + grad.to(old.dtype))
            updates.append(None if grad is None else -rate.to(new[-1].dtype) * new[-1])
        return tree.unflatten(tree.structure(grads), updates), (count + 1, tuple(new))

    return optim.GradientTransformation(init, update)


def unnamed_and_forgetful():
    return unnamed(fading=True)


def unpicklable():
    update = lambda grads, state, params: (GOOD.update(grads, state[0], params)[0], state)
    return optim.GradientTransformation(lambda params: (GOOD.init(params), lambda: None), update)


def refusing_empty():
    def init(params):
        if not tree.leaves(params):
            raise ValueError("no parameters")
        return GOOD.init(params)

    return GOOD._replace(init=init)


def with_fused(change):
    """Gives a good optimizer a one-pass form that is made from a good one."""
    tx = optim.sgd(0.1, momentum=0.9, fused=True)

    def fused(grads, state, params, **options):
        return change(tx.fused, grads, state, params, options)

    return tx._replace(fused=fused)


def never_skips():
    return with_fused(lambda fused, *args: fused(*args[:3], **{**args[3], "finite": None}))


def never_unscales():
    return with_fused(lambda fused, *args: fused(*args[:3], **{**args[3], "inv_scale": None}))


def takes_what_is_not_given():
    return with_fused(lambda fused, *args: fused(*args[:3], **{**args[3], "donate": True}))


def looking(update=None, observe=None):
    """Makes a part that counts zeros, and differs from a good one in one function."""

    def zeros(grads, state, read):
        found = [(read(grad) == 0.0).sum() for grad in tree.leaves(grads) if grad is not None]
        return torch.stack([state, *found]).sum().to(state.dtype)

    def look(grads, state, params):
        return grads, zeros(grads, state, lambda grad: grad)

    return optim.GradientTransformation(
        lambda params: torch.zeros((), dtype=torch.int32), update or look, observe=observe or zeros
    )


def does_more_than_look():
    return looking(update=lambda grads, state, params: (each(lambda leaf: leaf * 0.5)(grads), state))


def does_not_read():
    """Counts what is large, in gradients that are still scaled."""

    def large(grads, state):
        found = [(grad.abs() > 0.5).sum() for grad in tree.leaves(grads) if grad is not None]
        return torch.stack([state, *found]).sum().to(state.dtype)

    return looking(lambda grads, state, params: (grads, large(grads, state)), lambda g, state, read: large(g, state))
