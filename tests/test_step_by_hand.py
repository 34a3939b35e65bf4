"""The step that the example writes out by hand, against `fmp.train_step`."""

import runpy
from pathlib import Path

import fmp
from tests.bits import same_bits

EXAMPLE = Path(__file__).parent.parent / "examples" / "step_by_hand.py"


def test_the_example_runs_and_its_table_shows_a_skip_and_growth(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["step", "loss", "scale", "skipped", "equal"]
    assert [row[3] for row in rows].count("yes") == 1
    assert {row[2] for row in rows} == {"512", "1024", "2048"}
    assert {row[4] for row in rows} == {"yes"}
    assert float(rows[-1][1]) < 0.7 * float(rows[0][1])


def test_the_two_steps_agree_in_every_bit_of_state_loss_and_scale():
    example = runpy.run_path(str(EXAMPLE))
    step = fmp.train_step(
        example["loss_fn"],
        example["OPTIMIZER"],
        policy=example["POLICY"],
        loss_scale=example["SCALER"],
        clip_norm=example["MAX_NORM"],
    )
    noise = fmp.random.normal(0, (4, 16))
    params = {"hidden.weight": noise, "hidden.bias": noise[0], "out.weight": noise[1, :, None]}
    ours = theirs = step.init(params)
    for batch in map(example["make_batch"], range(8)):
        ours, loss = example["step_by_hand"](ours, batch)
        theirs, metrics = step(theirs, batch)
        assert same_bits((ours, loss), (theirs, metrics.loss))
    assert theirs.skip_count == 1
