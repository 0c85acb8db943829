"""Tests of castwise.lab.parity."""
