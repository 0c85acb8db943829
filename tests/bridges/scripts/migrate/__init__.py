"""Tests of castwise.bridges.scripts.migrate."""
