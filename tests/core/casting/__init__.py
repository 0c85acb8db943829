"""Tests of castwise.core.casting."""
