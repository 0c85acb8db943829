"""One suite that every plan must pass."""
