"""Tools that look at a model's numerics."""
