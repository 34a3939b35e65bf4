"""Names the line at which a test has planted something."""

import inspect
from pathlib import Path
from typing import Any


def planted(fn: Any) -> str:
    """Names the line of a function that says that it is planted."""
    lines, first = inspect.getsourcelines(fn)
    (index,) = [index for index, line in enumerate(lines) if line.rstrip().endswith("# planted")]
    return f"{Path(inspect.getfile(fn)).name}:{first + index} in {fn.__name__}"
