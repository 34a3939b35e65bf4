"""The train step, written out: what `fmp.train_step` does, in twenty lines of its public parts.

    python examples/step_by_hand.py

Trains a small network in float16 twice, side by side: once with `fmp.train_step`, once with the step below. One batch
is spoilt on purpose, so that its gradients overflow. After every step the two states are equal bit for bit.
"""

import torch
from torch import Tensor

import fmp

POLICY = fmp.opt_level("O2", half_dtype=torch.float16)
OPTIMIZER = fmp.optim.adamw(fmp.optim.schedules.linear(0.1, 0.01, transition_steps=20), weight_decay=0.1)
SCALER = fmp.DynamicLossScale(init_scale=2.0**10, growth_interval=6)
MAX_NORM = 1.0


def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the mean squared error of a network with one hidden layer, f32[]."""
    x, y = batch
    predicted = torch.tanh(x @ params["hidden.weight"] + params["hidden.bias"]) @ params["out.weight"]
    return (predicted.float() - y.float()).square().mean()


def step_by_hand(state: fmp.TrainState, batch: tuple[Tensor, Tensor]) -> tuple[fmp.TrainState, Tensor]:
    """Makes one step; returns the next state and the unscaled loss."""
    # The model computes in half precision, on a loss that is scaled in float32.
    scaler = state.loss_scale
    batch = POLICY.cast_to_compute(batch)

    def scaled_loss(params):
        loss = loss_fn(params, batch)
        return scaler.scale(loss), loss

    (_, loss), grads = fmp.value_and_grad(scaled_loss, has_aux=True)(POLICY.cast_to_compute(state.params))

    # From here on everything is float32. Clipping comes after unscaling, or it would clip another norm.
    grads = scaler.unscale(grads)
    finite = fmp.all_finite(grads)
    grads = fmp.optim.clip_to_norm(grads, fmp.global_norm(grads), MAX_NORM)

    # The optimizer sees and changes the float32 masters; the parameters are their rounded copies.
    full = fmp.master.merge(state.params, state.master)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, full)
    params, master = fmp.master.split(fmp.optim.apply_updates(full, updates), state.params, state.master)

    # An overflow leaves everything as it was, except the count of skipped steps and the loss scale.
    updated = fmp.tree.replace(state, step=state.step + 1, params=params, master=master, opt_state=opt_state)
    skipped = fmp.tree.replace(state, skip_count=state.skip_count + 1)
    next_state = fmp.select(finite, updated, skipped)
    return fmp.tree.replace(next_state, loss_scale=scaler.adjust(finite)), loss


def make_batch(index: int) -> tuple[Tensor, Tensor]:
    """Returns f32[64, 4] and f32[64, 1]; the batch at index 4 overflows float16."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(64, 4, generator=generator)
    y = torch.sin(2 * x[:, :1])
    return (x, y * 1e6) if index == 4 else (x, y)


def equal(left: fmp.TrainState, right: fmp.TrainState) -> bool:
    """Says whether all leaves of two states are equal, bit for bit."""
    pairs = zip(fmp.tree.leaves(left), fmp.tree.leaves(right), strict=True)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    params = {
        "hidden.weight": torch.randn(4, 16, generator=generator) * 0.5,
        "hidden.bias": torch.zeros(16),
        "out.weight": torch.randn(16, 1, generator=generator) * 0.25,
    }
    step = fmp.train_step(loss_fn, OPTIMIZER, policy=POLICY, loss_scale=SCALER, clip_norm=MAX_NORM)
    by_hand = by_train_step = step.init(params)

    print("step    loss   scale  skipped  equal")
    for index in range(20):
        batch = make_batch(index)
        by_hand, _ = step_by_hand(by_hand, batch)
        by_train_step, metrics = step(by_train_step, batch)
        same = equal(by_hand, by_train_step)
        print(
            f"{index:4d} {metrics.loss.item():7.3g} {metrics.loss_scale.item():7.0f}  "
            f"{'yes' if metrics.skipped else 'no':7s}  {'yes' if same else 'no'}"
        )
        assert same, "the two steps differ"


if __name__ == "__main__":
    main()
