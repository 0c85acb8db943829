"""Define the base class of all results: frozen data that can be converted to JSON, to a table and to a page."""

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
    """The base class of results, which are frozen dataclasses.

    The fields of a result and its ``kind`` form the record that is written to JSON and shown in reports.
    """

    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dict of values that JSON can hold.

        castwise makes its reports from this dict. NaN and infinite numbers become None.
        """
        record: dict[str, Any] = plain({"kind": self.kind, "version": RECORD_VERSION, **self._fields()})
        return record

    def _fields(self) -> dict[str, Any]:
        """Return the values of the record: the fields and, if there is a plan, the plan in words; subclasses add more."""
        fields: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return fields | {"words": in_words(fields["plan"])} if "plan" in fields else fields

    def to_json(self) -> str:
        """Return the dict of :meth:`to_dict` as JSON text."""
        return _text(self.to_dict())

    def table(self, *, verbose: bool = True) -> RenderableType:
        """Return the result as text and tables that ``rich.print`` can show.

        Args:
            verbose: Whether to return everything. If False, only as much as fits on a screen is returned.
        """
        from castwise.report.show import table

        return table(self.to_dict(), verbose)

    def _save(self, page: Path, data: Path, **about: Any) -> tuple[Path, ...]:
        """Write the record as JSON and as a page with pictures, and return the paths of the written files.

        Missing folders are created. If a library for the page is not installed, only the JSON file is written.
        ``about`` holds entries that are added to the files only, such as where the files were made.
        """
        from castwise.report.show import write

        record = self.to_dict() | about  # only once, since it may contain the present time
        page.parent.mkdir(parents=True, exist_ok=True)
        write_whole(data, _text(record) + "\n")
        with left_out(f"{page.name} with its pictures"):
            path, *pictures = write(record, page)
            return (path, data, *pictures)
        return (data,)


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1, allow_nan=False)


def finite(value: float) -> float | None:
    """Return the value, or None if it is NaN or infinite, for which JSON has no number."""
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
