"""Tests, laid out as the package is."""

import os

os.environ["CASTWISE_CACHE_DIR"] = ""  # what one test's search finds is nothing to another's
