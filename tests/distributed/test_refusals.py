"""Modules that run collectives of their own are refused, with advice; and looking for them loads nothing."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import fmp
from fmp.distributed_modules import check_no_wrapper, wrapper_of
from tests.distributed import fsdp2_cases as cases
from tests.distributed.processes import run

KINDS = {
    "ddp": r"DistributedDataParallel: gradients would silently stay local; pass the inner module, `.module`",
    "fsdp1": r"FullyShardedDataParallel: .*; pass the module before it is wrapped",
    "fsdp2": r"FSDPModule: .*; pass the module before `fully_shard`",
    "replicate by ddp": r"module changed by `replicate`: .*; pass the module before `replicate`",
    "replicate by fsdp": r"ReplicateModule: .*; pass the module before `replicate`",
}


@pytest.mark.parametrize("kind", KINDS)
def test_entry_points_refuse_modules_with_collectives(kind: str) -> None:
    for found in run(2, cases.refusals, kind):
        if kind == "ddp":  # which can be run twice
            assert found.pop("remat") == "nothing"
        for entry, message in found.items():
            path = "module" if entry in ("functionalize", "plan") else "1"
            assert re.match(rf"TypeError: \w+: {path} is a {KINDS[kind]}", message), message
            assert "fmp.distributed.Layout" in message
            assert "fmp.distributed.fsdp2_value_and_grad" in message


def test_remat_goes_with_ddp_and_inside_of_fsdp2() -> None:
    assert max(run(2, cases.rematerialized_ddp)) < 1e-6
    assert max(run(2, cases.remat_inside_of_fsdp2)) < 1e-6


def test_modules_of_the_same_name_are_no_wrappers() -> None:
    class DistributedDataParallel(nn.Linear):
        pass

    class DDP(nn.Linear):
        pass

    check_no_wrapper(nn.Sequential(DistributedDataParallel(2, 2), DDP(2, 2)), "the test")
    assert wrapper_of(DDP) is None
    out, _ = (model := fmp.functionalize(DDP(2, 2))).apply(model.params, model.buffers, torch.ones(1, 2))
    assert out.shape == (1, 2)


def test_looking_for_wrappers_loads_nothing() -> None:
    code = """
import sys, torch, fmp
fmp.functionalize(torch.nn.Linear(2, 2))
fmp.memory.plan(torch.nn.Linear(2, 2))
heavy = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "fmp.distributed")
print([name for name in heavy if name in sys.modules])
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"
