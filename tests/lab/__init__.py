"""Tests of castwise.lab."""
