"""Small models with one numerically fragile place each, their sound twins, and a judge that knows nothing of parity."""
