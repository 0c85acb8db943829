"""Tests in real processes, on gloo."""
