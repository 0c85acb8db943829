"""Shared by the tests of scripts that are tried."""

from tests.script.tried import forks

__all__ = ["forks"]
