"""Apex 1.8: the state dict, and a run that goes on in another process, bit for bit."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fmp.compat import amp
from tests.bits import same_bits

ROOT = Path(__file__).parent.parent.parent

# What both processes run: `steps` more steps, from a file if there is one, into another.
SCRIPT = """
import sys
import torch
from torch import nn
from fmp.compat import amp

def run(level, half, steps, start, end, order="model optimizer amp"):
    torch.set_num_threads(1)
    torch.manual_seed(3 if start else 0)  # the first weights of a resumed run are to be overwritten
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    amp.initialize(
        model, optimizer, opt_level=level, half_dtype=half, loss_scale="dynamic", num_losses=2, verbosity=0
    )
    first = 0
    if start:
        saved = torch.load(start, weights_only=True)
        first = saved["next"]
        parts = {"model": model, "optimizer": optimizer, "amp": amp}
        for name in order.split():
            parts[name].load_state_dict(saved[name])
    for index in range(first, first + steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(index))
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().square().mean(), optimizer, loss_id=index % 2) as scaled:
            scaled.backward()
        optimizer.step()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
            "next": first + steps,
        },
        end,
    )
    amp.shutdown()

if __name__ == "__main__":
    level, half, steps, start, end = sys.argv[1:]
    run(level, half, int(steps), start, end)
"""
run: Any = {"__name__": "script"}
exec(SCRIPT, run)
run = run["run"]


def start(*args: Any, **kwargs: Any) -> Any:
    return amp.initialize(*args, **{"verbosity": 0} | kwargs)


def trained(level: str = "O2", **kwargs: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    start(model, optimizer, opt_level=level, **{"loss_scale": 4.0} | kwargs)
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(level, half, tmp_path):
    run(level, half, 6, "", tmp_path / "whole")
    run(level, half, 3, "", tmp_path / "first")
    for order in ("model optimizer amp", "amp optimizer model", "optimizer model amp"):
        run(level, half, 3, tmp_path / "first", tmp_path / "second", order)
        whole, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("whole", "second"))
        assert whole["next"] == 6
        assert same_bits(whole, resumed)


def test_a_run_goes_on_in_another_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]; from script import run\n"
        "for level in ('O0', 'O1', 'O2', 'O3'): run(level, 'bf16', 3, sys.argv[2] + f'/first {level}', "
        "sys.argv[2] + f'/second {level}')"
    )
    for level in ("O0", "O1", "O2", "O3"):
        run(level, "bf16", 6, "", tmp_path / f"whole {level}")
        run(level, "bf16", 3, "", tmp_path / f"first {level}")
    subprocess.run([sys.executable, "-c", code, str(ROOT), str(tmp_path)], check=True)
    for level in ("O0", "O1", "O2", "O3"):
        whole, resumed = (torch.load(tmp_path / f"{name} {level}", weights_only=True) for name in ("whole", "second"))
        assert same_bits(whole, resumed)


def test_the_state_dict_is_apexs_with_copies_of_the_masters():
    _, optimizer = trained(num_losses=2)
    state = amp.state_dict()
    assert list(state) == ["loss_scaler0", "loss_scaler1", "masters"]
    assert state["loss_scaler0"] == {"loss_scale": 4.0, "unskipped": 1}
    masters = [p.detach() for p in amp.master_params(optimizer)]
    assert same_bits(state["masters"], [masters])
    with torch.no_grad():
        masters[0].zero_()
    assert state["masters"][0][0].any()


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_without_masters_the_state_dict_is_apexs(level):
    trained(level)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_dict_of_apex_is_loaded(level):
    _, optimizer = trained(level, loss_scale="dynamic", half_dtype="bf16")
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 256.0, "unskipped": 17}})
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 256.0, "unskipped": 17}
    assert same_bits(before, [p.detach() for p in amp.master_params(optimizer)])


def test_a_static_scale_is_loaded_as_well():
    trained()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 256.0, "unskipped": 17}})
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 256.0, "unskipped": 17}


@pytest.mark.parametrize(("count", "expected"), [(1, [2.0, 4.0]), (2, [2.0, 2.0]), (3, [2.0, 2.0])])
def test_another_number_of_scalers_warns_and_loads_the_first_ones(count, expected, capsys):
    trained("O1", num_losses=2, verbosity=1)
    capsys.readouterr()
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0, "unskipped": 0} for i in range(count)})
    assert [state["loss_scale"] for state in amp.state_dict().values()] == expected
    assert ("Warning" in capsys.readouterr().out) == (count != 2)


@pytest.mark.parametrize(
    ("saved", "now", "levels"),
    [
        (("O2", "f16"), ("O1", "f16"), "saved at O2 in f16, and amp was initialized at O1 in f16"),
        (("O1", "f16"), ("O2", "f16"), "saved at O1 in f16, and amp was initialized at O2 in f16"),
        (("O0", "f16"), ("O3", "bf16"), "saved at O0, and amp was initialized at O3 in bf16"),
        (("O2", "f16"), ("O2", "bf16"), "saved at O2 in f16, and amp was initialized at O2 in bf16"),
        (("O0", "f16"), ("O0", "bf16"), None),
        (("O2", "bf16"), ("O2", "bf16"), None),
    ],
)
def test_a_dict_of_another_level_warns_and_names_both(saved, now, levels, tmp_path, capsys):
    trained(saved[0], half_dtype=saved[1])
    torch.save(amp.state_dict(), tmp_path / "amp")
    amp.shutdown()
    trained(now[0], half_dtype=now[1], verbosity=1)
    capsys.readouterr()
    amp.load_state_dict(torch.load(tmp_path / "amp"))
    printed = capsys.readouterr().out
    assert printed == ("" if levels is None else f"Warning: the state dict was {levels}\n")


def test_masters_tell_of_another_level_where_nothing_else_does(capsys):
    trained("O2")
    saved = dict(amp.state_dict())
    amp.shutdown()
    trained("O1", verbosity=1)
    capsys.readouterr()
    amp.load_state_dict(saved)
    assert "a level with master weights, and amp was initialized at O1" in capsys.readouterr().out


def test_the_order_of_the_entries_decides():
    trained("O1", num_losses=2)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": 0} for i in (5, 3)})
    assert [state["loss_scale"] for state in amp.state_dict().values()] == [32.0, 8.0]


GOOD = {"loss_scale": 2.0, "unskipped": 1}


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"scaler1": GOOD}, RuntimeError),
        ({"loss_scaler1": {"loss_scale": 2.0}}, ValueError),
        ({"loss_scaler1": None}, ValueError),
        ({"loss_scaler1": {"loss_scale": 0.0, "unskipped": 0}}, ValueError),
        ({"loss_scaler1": {"loss_scale": float("nan"), "unskipped": 0}}, ValueError),
        ({"loss_scaler1": {"loss_scale": 2.0, "unskipped": -1}}, ValueError),
        ({"masters": [[torch.zeros(2, 3)]]}, ValueError),
        ({"masters": [[torch.zeros(2, 3), torch.zeros(3)]]}, ValueError),
        ({"masters": [[torch.zeros(2, 3), 1.0]]}, ValueError),
        ({"masters": []}, ValueError),
        ({"masters": 3}, ValueError),
    ],
)
def test_a_bad_dict_changes_nothing(bad, error):
    trained(num_losses=2)
    before = amp.state_dict()
    with pytest.raises(error, match=r"state_dict.*" + next(iter(bad))):
        amp.load_state_dict({"loss_scaler0": GOOD, **bad})
    assert same_bits(before, amp.state_dict())


def test_loading_masters_sets_the_model():
    model, _ = trained()
    amp.load_state_dict({"loss_scaler0": GOOD, "masters": [[torch.full((2, 3), 1.0001), None]]})
    assert torch.equal(model.weight, torch.ones(2, 3, dtype=torch.float16))
    assert model.bias.any()


def test_masters_are_loaded_into_the_parameters_of_a_level_without_them():
    trained("O2")
    saved = amp.state_dict()
    amp.shutdown()
    model, _ = trained("O0")
    amp.load_state_dict(saved)
    assert same_bits([p.detach() for p in model.parameters()], saved["masters"][0])


@pytest.mark.parametrize("call", [amp.state_dict, lambda: amp.load_state_dict({})])
def test_without_initialize_it_is_a_runtime_error(call):
    with pytest.raises(RuntimeError, match=r"call amp\.initialize"):
        call()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_whole_model_can_be_pickled(level):
    model, _ = trained(level)
    again = pickle.loads(pickle.dumps(model))
    again.load_state_dict(model.state_dict())
    assert same_bits(dict(again.state_dict()), dict(model.state_dict()))
    assert same_bits(again(torch.ones(1, 3)).detach(), model(torch.ones(1, 3)).detach())
