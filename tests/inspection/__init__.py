"""Tools that look at a model."""
