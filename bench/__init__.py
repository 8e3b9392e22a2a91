"""Measures Farhand's promised figures beside other ways to run a model's Python: `scripts/bench`."""
