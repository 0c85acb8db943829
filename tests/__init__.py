"""Tests, laid out as the package is."""

import os

os.environ["CASTWISE_CACHE_DIR"] = ""  # a cached search result must not affect other tests
