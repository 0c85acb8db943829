"""Tests of fp32 master weights: steps, writes, averages, loading, freezing and closing."""
