"""The corpus of ``bench/nonfinite``, loaded by path because that folder is not a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def _load() -> Any:
    path = Path(__file__).parents[3] / "bench" / "nonfinite" / "makers.py"
    spec = importlib.util.spec_from_file_location("nonfinite_makers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


corpus = _load()
