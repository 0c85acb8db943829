"""Watch a training while it runs: what its numerics do, and what is done where they fail."""
