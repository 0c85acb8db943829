"""Tests with several real processes."""
