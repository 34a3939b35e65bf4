"""Collectives of known size that processes run, and what the benchmark of bytes finds that they send."""

import torch
from torch import distributed

from fmp._compat import collectives
from tests.bench.zero_bytes import Traffic, sent_by_sockets

COUNT = 2**16  # of numbers in float32


def known() -> dict[str, tuple[int, int]]:
    """By collective, the bytes counted and those that left through sockets."""
    size, group = distributed.get_world_size(), distributed.group.WORLD
    assert group is not None
    x, odd = torch.ones(COUNT), torch.ones(COUNT + 1, dtype=torch.uint8)
    calls = {
        "all-gather": lambda: collectives.all_gather([x.view(torch.uint8), odd], size, group.group_name),
        "reduce-scatter": lambda: collectives.reduce_scatter([x, x], size, group.group_name),
        "all-reduce": lambda: collectives.all_reduce([x], group.group_name),
    }
    found = {}
    for name, call in calls.items():
        before = sent_by_sockets()
        with Traffic() as traffic:
            call()
        assert [*traffic.sent] == [name]
        found[name] = traffic.sent[name], sent_by_sockets() - before
    return found


def uncounted() -> str:
    """What becomes of a collective whose bytes nobody knows."""
    try:
        with Traffic():
            torch.ops._c10d_functional.broadcast(torch.ones(1), 0, distributed.group.WORLD.group_name)  # pyright: ignore
    except NotImplementedError as error:
        return str(error)
    return "counted"
