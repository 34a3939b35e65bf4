"""What a train step carries from one call to the next, and what it reports."""

from typing import Any

import torch

from fmp import tree

Tree = Any


@tree.dataclass
class TrainState:
    """Everything that a run needs to go on, as a tree of tensors.

    Attributes:
        step: i32[], the number of steps that changed a parameter.
        params: The parameters as the model computes with them.
        master: What is kept beside them for the optimizer, by the policy's form of masters: float32 copies, or less
            (see `fmp.master`); None for a leaf that needs none.
        opt_state: The optimizer's state, or one by group of parameters.
        loss_scale: The loss scaler, or one by loss.
        buffers: What the model keeps besides parameters, such as BatchNorm statistics; None without.
        ema: The exponential moving average of the parameters, in float32 or wider; None without.
        seed: i64[], what all randomness of the run derives from.
        skip_count: i32[], the number of skipped updates, or one by group of parameters.
    """

    step: torch.Tensor
    params: Tree
    master: Tree
    opt_state: Tree
    loss_scale: Any
    buffers: Tree
    ema: Tree
    seed: torch.Tensor
    skip_count: Any


@tree.dataclass
class Metrics:
    """What a step reports; with several losses or groups, dictionaries by their names.

    Attributes:
        loss: f32[], unscaled, before the update. By loss.
        aux: What the loss function returned besides. By loss.
        grads_finite: bool[], whether all unscaled gradients are finite. By loss.
        skipped: bool[], whether the update was skipped. By group.
        loss_scale: f32[], the scale that this step used. By loss.
        grad_norm: f32[], the norm of the unscaled gradients before clipping. By group.
    """

    loss: Any
    aux: Tree
    grads_finite: Any
    skipped: Any
    loss_scale: Any
    grad_norm: Any
