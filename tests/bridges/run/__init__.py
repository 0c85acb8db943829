"""Tests of castwise.bridges.run."""
