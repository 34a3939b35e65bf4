"""Reads and writes folders in the published DFloat11 format."""

from fmp.df11.published.reader import read_dfloat11 as read_dfloat11
from fmp.df11.published.writer import write_dfloat11 as write_dfloat11
