"""Experiments on a copy of a model: timing, parity, search, inspection; also watching a run, and workloads."""
