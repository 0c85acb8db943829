"""Prepare, fail, interrupt, step, get, save, load and close in random order, compared with a twin without castwise."""
