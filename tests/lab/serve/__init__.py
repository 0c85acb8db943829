"""Tests of models that are served."""
