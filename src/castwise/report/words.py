"""Format numbers as text, in the same way for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castwise.core.amounts import digits
from castwise.core.amounts import listed as listed
from castwise.core.amounts import number as number
from castwise.core.amounts import percent as percent
from castwise.core.amounts import size as size

Record = Mapping[str, Any]

MEANING = (
    "the relative error of an update: the squared error that a plan adds to one update, divided by the expected squared "
    "norm of the update"
)
"""The definition of damage, for every text that reports damage."""
PAIRED = (
    "A speed is the median ratio of times measured side by side, not the ratio of two medians; the two differ if the "
    "machine's speed changed in between."
)
"""A sentence that explains why the speeds in a table need not be the ratios of its times."""
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def time(seconds: float) -> str:
    """Format seconds to three digits in a suitable unit, as ``12.5 ms``."""
    unit, size = _unit(seconds)
    return f"{digits(seconds / size)} {unit}"


def step(summary: Record | None) -> str | None:
    """Format the median and half the interquartile range, as ``12.5 ±0.3 ms``."""
    if summary is None:
        return None
    unit, size = _unit(summary["median_s"])
    median = digits(summary["median_s"] / size)
    places = len(median.partition(".")[2])
    return f"{median} ±{(summary['q3_s'] - summary['q1_s']) / 2 / size:.{places}f} {unit}"


def against(count: float | None, reference: float | None) -> str:
    """Format bytes, and by how much they differ from a reference, as ``7.46 MiB (-20 %)``."""
    if count is None:
        return "-"
    change = f" ({count / reference - 1:+.0%})".replace("%", " %") if reference else ""
    return size(count) + change


def factor(value: float) -> str:
    """Format a factor to three digits, as ``1.96x``."""
    return f"{digits(value)}x"


def speed(ratio: Record | None) -> str | None:
    """Format a ratio with its interval, as ``1.96x (1.81-2.02)``; if it has no upper end, as ``1.96x (no interval)``."""
    if ratio is None:
        return None
    said = "no interval" if ratio["high"] is None else interval(ratio).replace(" to ", "-")
    return f"{factor(ratio['value'])} ({said})"


def interval(ratio: Record) -> str:
    """Format a ratio's interval, as ``1.81 to 2.02``. An end close to 1 gets enough digits to differ from 1."""
    ends = [ratio[end] for end in ("low", "high")]
    said = ["?" if end is None else digits(end) for end in ends]
    return " to ".join(
        f"{end:.4f}" if text in ("1.00", "1.000") and end != 1 else text
        for end, text in zip(ends, said, strict=True)
    )


def loss(value: float | None) -> str:
    """Format a loss to four digits. A record holds None for a loss that is not finite."""
    return "not finite" if value is None else f"{value:.4g}"


def damage(value: float | None) -> str:
    """Format damage to two digits. A record holds None for damage that is not finite."""
    if value is None:
        return "not finite"
    return "0" if value == 0 else f"{value:.2g}"


def share(value: float, reference: float) -> str:
    """Format the difference from a reference in per cent, as ``29 % less``."""
    change = value / reference - 1.0
    if abs(change) < 0.005:
        return "as much"
    return f"{abs(change) * 100:.0f} % {'less' if change < 0 else 'more'}"


def pasted(line: str, width: int = 76, *, serves: bool = False, widen: bool | str = False) -> str:
    """Return the Python code that trains or serves under a plan. The plan's line is broken at its ``+`` if it is too wide."""
    whole = f'amp = castwise.Amp("{line}")'
    if len(whole) > width:
        first, *rest = line.split("+")
        rows = [first]
        for part in (f"+{part}" for part in rest):
            if len(rows[-1] + part) > width - 6:
                rows.append(part)
            else:
                rows[-1] += part
        whole = "\n".join(["amp = castwise.Amp(", *(f'    "{row}"' for row in rows), ")"])
    more = f", widen={widen!r}" if widen else ""
    use = (
        f"model = amp.prepare(model.eval(), inference=True{more})"
        if serves
        else f"model, optimizer = amp.prepare(model, optimizer{more})"
    )
    return f"{whole}\n{use}"


def where(record: Record) -> str:
    """Describe the machine, the versions and the number of processes in one line."""
    env = record["environment"]
    castwise = f"castwise {env['castwise']}" + (f" at {env['commit']}" if env["commit"] else "")
    threads = f"{env['threads']} thread{'s' if env['threads'] != 1 else ''}"
    versions = f"torch {env['torch']}, Python {env['python']}, {castwise}"
    count = record.get("ranks", 1)
    together = f"; {count} ranks together" if isinstance(count, int) and count > 1 else ""
    return f"{env['device']}, {threads}{together}; {versions}; {env['date'][:10]}"


def _unit(seconds: float) -> tuple[str, float]:
    return next((u for u in _UNITS if seconds >= u[1]), _UNITS[-1])
