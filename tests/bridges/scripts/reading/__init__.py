"""Tests of castwise.bridges.scripts.reading."""
