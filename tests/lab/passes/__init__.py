"""Tests of castwise.lab.passes."""
