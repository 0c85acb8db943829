"""Tests of castwise.core.scaler."""
