"""Base class of the results of jobs and tools: frozen data that can be converted to JSON, a table and a page."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from castwise.core.extras import left_out
from castwise.core.files import write_whole
from castwise.core.plans.words import in_words
from castwise.core.schemas import RECORD_VERSION

if TYPE_CHECKING:
    from rich.console import RenderableType


class Result:
    """Base class of results: frozen dataclasses whose fields, with ``kind``, form the record."""

    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, from which reports are made; non-finite numbers become None."""
        record: dict[str, Any] = plain({"kind": self.kind, "version": RECORD_VERSION, **self._fields()})
        return record

    def _fields(self) -> dict[str, Any]:
        """The dataclass's fields, the plan in words, and what a kind of result derives from its fields."""
        fields: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return fields | {"words": in_words(fields["plan"])} if "plan" in fields else fields

    def to_json(self) -> str:
        """The record as JSON text."""
        return _text(self.to_dict())

    def table(self, *, verbose: bool = True) -> RenderableType:
        """The result as text and tables for ``rich.print``: all of it, or a version that fits on a screen."""
        from castwise.report.show import table

        return table(self.to_dict(), verbose)

    def _save(self, page: Path, data: Path, **about: Any) -> tuple[Path, ...]:
        """Write the record, and where the libraries are there the page with its pictures; folders are made.

        ``about`` is of the files alone, such as where they were made.
        """
        from castwise.report.show import write

        record = self.to_dict() | about  # once: it may say what time it is
        page.parent.mkdir(parents=True, exist_ok=True)
        write_whole(data, _text(record) + "\n")
        with left_out(f"{page.name} with its pictures"):
            path, *pictures = write(record, page)
            return (path, data, *pictures)
        return (data,)


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1, allow_nan=False)


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """Convert a value to JSON's types: mappings, lists, and None for NaN and infinities."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
