"""Tests of castwise.bridges.trainers."""
