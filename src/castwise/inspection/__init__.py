"""Tools that look at a model's numerics before or beside its training; each works on copies and leaves no trace."""
