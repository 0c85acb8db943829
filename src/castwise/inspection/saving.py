"""A finding written to a folder: the record as JSON, and its page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise.measure.environment import environment

if TYPE_CHECKING:
    import os


def save(record: Mapping[str, Any], device: str, folder: str | os.PathLike[str]) -> Path:
    """Write a record and its page, named by the record's kind, into a folder that is made; returns the page's path.

    Args:
        record: Plain JSON values, with ``kind`` and ``workload``.
        device: That it is about; what it was found on is added to the record.
        folder: To write to.
    """
    from castwise.report.show import page

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    whole = {"description": "", **record, "environment": dataclasses.asdict(environment(device))}
    text = json.dumps(whole, indent=2, allow_nan=False)
    (target / f"{record['kind']}.json").write_text(text + "\n", encoding="utf-8")
    path = target / f"{record['kind']}.html"
    path.write_text(page(whole), encoding="utf-8", errors="backslashreplace")
    return path
