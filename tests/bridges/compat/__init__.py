"""Tests of castwise.bridges.compat."""
