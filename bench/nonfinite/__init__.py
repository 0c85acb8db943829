"""Makers of NaN and infinities with the truth about each, and twins in which infinities are meant."""
