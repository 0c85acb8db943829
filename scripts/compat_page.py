"""Write docs/compat.md: the names that the drop-ins for other libraries have, from the drop-ins' lists."""

from __future__ import annotations

from pathlib import Path

from castwise.bridges.compat.coverage import STATUSES, covered

PAGE = Path(__file__).parent.parent / "docs" / "compat.md"
DROP_INS = {
    "apex": (
        "Apex",
        "The contract is that of NVIDIA/apex at e13873de, the last commit that held `apex.amp`. "
        "[From Apex](from-apex.md) has the way over.",
    ),
    "colossalai": ("Colossal-AI", "The contract is that of its legacy AMP."),
}
_COUNTED = {"works": "work", "differs": "differ", "absent": "are absent"}
INTRODUCTION = """\
# Drop-ins, name by name

<!-- Written by scripts/compat_page.py from the lists src/castwise/bridges/compat/*/coverage.toml. Edit those instead. -->

Scripts that were written for these libraries run on castwise. *Works*: as in the original. *Differs*: it is there and
does something else, for the reason given. *Absent*: using it raises, and the note says what to use instead.

"""


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    parts += (_section(package, title, text) for package, (title, text) in DROP_INS.items())
    return "".join(parts).rstrip() + "\n"


def _section(package: str, title: str, text: str) -> str:
    rows = covered(package)
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
