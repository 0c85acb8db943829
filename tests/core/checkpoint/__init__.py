"""Tests of castwise.core.checkpoint."""
