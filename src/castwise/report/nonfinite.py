"""Where the first value came up that is not finite, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]


def headline(record: Record) -> str:
    """The finding in a sentence or two."""
    return str(record["why"])
