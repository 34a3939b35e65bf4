"""The battery's table, optimizer by law, as docs/optimizers.md shows it: `python -m tests.optim.table`."""

from tests.optim.battery import ROWS, Row

LAWS = {
    "test_dtypes_are_stable": "dtypes stable",
    "test_moments_are_wide": "moments in float32",
    "test_zero_gradients_change_nothing": "zero gradients change nothing",
    "test_empty_trees": "empty trees",
    "test_a_leaf_without_gradient_is_left_alone": "gradient None",
    "test_update_is_pure": "pure",
    "test_inits_share_no_memory": "no shared memory",
    "test_state_travels": "state travels",
    "test_vmap_is_a_loop": "vmap",
    "test_compiled_is_eager_and_compiles_once": "compile",
    "test_update_is_differentiable": "differentiable",
    "test_the_gradient_through_a_zero_gradient_is_finite": "and at zero",
}


def table() -> str:
    """Writes the table in Markdown, with a note for each law that a row cannot keep."""
    reasons = list(dict.fromkeys(row.cannot[law] for row in ROWS for law in LAWS if law in row.cannot))
    lines = ["| optimizer | " + " | ".join(LAWS.values()) + " |", "|---|" + "---|" * len(LAWS)]
    lines += [f"| {row.name} | " + " | ".join(_cell(row, law, reasons) for law in LAWS) + " |" for row in ROWS]
    notes = [f"- no ({number}): {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, "", *notes])


def _cell(row: Row, law: str, reasons: list[str]) -> str:
    if law in row.cannot:
        return f"no ({reasons.index(row.cannot[law]) + 1})"
    return "decays" if law == "test_zero_gradients_change_nothing" and row.decays else "yes"


if __name__ == "__main__":
    print(table())
