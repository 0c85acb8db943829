"""Tests of castwise.bridges.scripts."""
