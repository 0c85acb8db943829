"""Tests of castwise.core.plans."""
