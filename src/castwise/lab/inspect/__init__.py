"""Examine a model's numerics, and leave the model unchanged."""
