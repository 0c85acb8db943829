"""Tests of castwise.core."""
