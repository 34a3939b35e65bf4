"""One contender of a race: sets itself up, then runs as many steps as each line on standard input asks for."""

import importlib
import json
import os
import sys
import time


def main() -> None:
    module, variant, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    step = importlib.import_module(module).setup(variant)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
