"""Write docs/compat.md: what the drop-ins for other libraries have, from their own lists."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from castwise.compat.coverage import STATUSES, Covered

PAGE = Path(__file__).parent.parent / "docs" / "compat.md"
DROP_INS = {
    "castwise.compat.apex.coverage": (
        "Apex",
        "The contract is that of NVIDIA/apex at e13873de, the last commit that held `apex.amp`. "
        "[From Apex](from-apex.md) has the way over.",
    ),
    "castwise.compat.colossalai.coverage": ("Colossal-AI", "The contract is that of its legacy AMP."),
}
_COUNTED = {"works": "work", "differs": "differ", "absent": "are absent"}
INTRODUCTION = """\
# Drop-ins, name by name

<!-- Written by scripts/compat_page.py from the coverage lists in src/castwise/compat. Edit those instead. -->

Scripts that were written for these libraries run on castwise. *Works*: as in the original. *Differs*: it is there and
does something else, for the reason given. *Absent*: using it raises, and the note says what to use instead.

"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for module, (title, text) in DROP_INS.items():
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is not None:
            parts.append(_section(title, text, importlib.import_module(module).COVERED))
    return "".join(parts).rstrip() + "\n"


def _section(title: str, text: str, names: Iterable[Covered]) -> str:
    rows = list(names)
    counts = ", ".join(
        f"{sum(row.status == status for row in rows)} {_COUNTED[status]}" for status in STATUSES
    )
    lines = [f"| `{row.name}` | {row.status} | {row.note} |" for row in rows]
    return (
        f"## {title}\n\n{text}\n\nOf {len(rows)} entries: {counts}.\n\n| name | status | note |\n|---|---|---|\n"
        + "\n".join(lines)
        + "\n\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
