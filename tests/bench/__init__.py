"""Benchmarks: `python -m tests.bench` prints what fmp costs next to its peers, measured in the same run."""
