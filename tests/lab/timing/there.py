"""A function to run in measuring processes; this module imports nothing beyond ``sys``."""

import sys


def has(_pipe: object, name: str) -> bool:
    """Return True if a module is imported."""
    return name in sys.modules
