"""Tests of castwise.lab.watch."""
