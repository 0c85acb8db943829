"""Bridges to other code: drop-ins, scripts and trainers, built on castwise's public names only."""
