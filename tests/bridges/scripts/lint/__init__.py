"""Tests of castwise.bridges.scripts.lint."""
