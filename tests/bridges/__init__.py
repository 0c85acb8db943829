"""Tests of castwise.bridges."""
