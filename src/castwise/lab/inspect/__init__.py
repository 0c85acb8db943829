"""Tools that examine a model's numerics and leave the model unchanged."""
