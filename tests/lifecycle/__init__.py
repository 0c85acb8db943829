"""Prepare, fail, interrupt, step, get, save, load, close in random order, beside a twin without castwise."""
