"""Tests of castwise.core.session."""
