"""Tests of the built-in workloads."""
