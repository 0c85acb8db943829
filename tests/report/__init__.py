"""Tests of castwise.report."""
