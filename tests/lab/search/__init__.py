"""Tests of castwise.lab.search."""
