"""The private names of torch that tell where an op was called, and what they must go on doing."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmp import _compat
from fmp._compat import next_number, running_node


class Numbers(TorchDispatchMode):
    """Notes the number of the next node, and of the node that runs, for each op."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        node = running_node()
        self.seen.append((func.overloadpacket, next_number(), node and _compat.recorded_at(node), node and node.name()))
        return func(*args, **(kwargs or {}))


def test_a_node_has_its_number_when_its_op_runs():
    x = torch.ones(3, requires_grad=True)
    with Numbers() as numbers:
        first = next_number()
        y = x.sin()
        z = y.exp()
    assert [_compat.recorded_at(tensor.grad_fn) for tensor in (y, z)] == [first, first + 1]
    assert [seen[:3] for seen in numbers.seen if seen[0] != torch.ops.aten.detach] == [
        (torch.ops.aten.sin, first + 1, None),
        (torch.ops.aten.exp, first + 2, None),
    ]


def test_the_node_that_runs_in_a_backward_pass():
    x = torch.ones(3, requires_grad=True)
    y = x.sin()
    with Numbers() as numbers:
        y.sum().backward()
    number = _compat.recorded_at(y.grad_fn)
    assert ("SinBackward0", number) in [(name, running) for _, _, running, name in numbers.seen]
    assert running_node() is None
