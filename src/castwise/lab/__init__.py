"""What experiments on a copy of a model: timing, parity, search, inspection, watching a run, workloads."""
