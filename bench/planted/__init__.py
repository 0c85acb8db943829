"""Small models with one numerically fragile place each, their sound twins, and a judge without the parity test."""
