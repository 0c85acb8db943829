"""Format numbers and lists of names for use in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence


def size(count: float) -> str:
    """Return a number of bytes as text with three digits, in powers of 1024, such as ``7.46 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{digits(count / size)} {unit}"
    return f"{count:.0f} B"


def number(value: float) -> str:
    """Return a number as text, from 1,000 on with thousands separators, otherwise with three digits."""
    return f"{value:,.0f}" if 1000 <= value < 1e15 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a fraction as text, as a percentage with two digits, such as ``3.1 %``."""
    if 0.0 < share < 1e-4:
        return "less than 0.01 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def listed(names: Sequence[str]) -> str:
    """Return names as an English list, such as ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def digits(value: float) -> str:
    """Return a non-negative number as text with three digits."""
    if value <= 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(value) + 1e-9))
    return f"{value:.{min(places, 6)}f}"
