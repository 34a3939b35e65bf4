from pathlib import Path

from tests.optim import test_laws
from tests.optim.battery import ROWS
from tests.optim.table import LAWS, table

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"


def test_the_page_shows_the_table_of_the_battery():
    assert table() in PAGE.read_text()


def test_every_law_has_a_column_and_every_row_a_cell():
    laws = {name for name in vars(test_laws) if name.startswith("test_")} - {"test_declared_exceptions_name_laws"}
    assert set(LAWS) == laws
    rows = table().splitlines()[2 : 2 + len(ROWS)]
    assert all(len(row.split("|")) == len(LAWS) + 3 for row in rows)
    assert all(cell.strip() for row in rows for cell in row.split("|")[1:-1])
