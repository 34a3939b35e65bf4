"""The groups of weights of the published DFloat11 format: their code, their tables and their streams."""
