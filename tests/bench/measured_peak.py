"""How far the peak of a step that `fmp.memory.measure_step` finds on fake tensors is from that of a real one."""

import torch

import fmp
from fmp import tree
from tests.memory import peak_bytes
from tests.test_memory_measure import MODELS, classify


def measured_errors() -> dict[str, float]:
    """Returns the relative errors, by network, of an O2 step in float16 with Adam, with and without remat."""
    errors = {}
    for name, make in MODELS.items():
        for remat in (False, True):
            module, batch = make(remat)
            model = fmp.functionalize(module)
            policy = fmp.opt_level("O2", torch.float16, keep_full=module)
            step = fmp.train_step(classify(model), fmp.optim.adam(1e-3), policy=policy)
            state = step.init(model.params, buffers=model.buffers)
            there = sum(leaf.nbytes for leaf in tree.leaves((state, batch)) if isinstance(leaf, torch.Tensor))
            real = there + peak_bytes(lambda step=step, state=state, batch=batch: step(state, batch))
            measured = fmp.memory.measure_step(step, model.params, batch, buffers=model.buffers).peak
            errors[f"{name}, {'remat' if remat else 'kept'}"] = abs(measured / real - 1)
    return errors
