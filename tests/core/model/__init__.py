"""Tests of castwise.core.model."""
