"""Masters beyond the step: what else writes, averages, loads, freezes and closes."""
