"""Tools that look at a model's numerics, and leave it as it was."""
