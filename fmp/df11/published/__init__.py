"""Reads and writes folders in the published DFloat11 format: `fmp.df11.read_dfloat11` and `write_dfloat11`."""
