"""One run of the coverage-guided fuzzer, which ends its process: `python -m tests.soak.df11_fuzzer [options]`.

`python -m tests.soak df11` starts it, and starts it again after a finding.
"""

import importlib
import sys
from typing import Any

try:
    atheris: Any = importlib.import_module("atheris")
except ModuleNotFoundError as error:
    raise SystemExit(f"the fuzzer needs atheris, which has wheels for Linux: pip install atheris ({error})") from None

# What numba compiles must stay as it is.
with atheris.instrument_imports(
    include=["fmp.df11", "fmp.df11_codec"], exclude=["fmp.df11_codec.numba_codec", "fmp.df11_codec.published.loops"]
):
    from tests.soak import df11_targets

if __name__ == "__main__":
    for seed in df11_targets.seeds():
        df11_targets.run(seed)  # numba compiles here, and not within the time of an input
    atheris.Setup(sys.argv, df11_targets.run)
    atheris.Fuzz()
