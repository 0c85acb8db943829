"""Tests of castwise.core.serve, and of prepare(inference=True) with generate loops."""
