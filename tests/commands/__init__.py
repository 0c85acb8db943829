"""Tests of castwise.commands."""
