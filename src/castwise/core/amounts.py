"""Format numbers and lists of names for use in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence


def size(count: float) -> str:
    """Bytes to three digits in powers of 1024, such as ``7.46 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{digits(count / size)} {unit}"
    return f"{count:.0f} B"


def number(value: float) -> str:
    """A number: with thousands separators if large, else to three digits."""
    return f"{value:,.0f}" if 1000 <= value < 1e15 else f"{value:.3g}"


def percent(share: float) -> str:
    """A fraction as a percentage to two digits, such as ``3.1 %``."""
    if 0.0 < share < 1e-4:
        return "less than 0.01 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def listed(names: Sequence[str]) -> str:
    """Names as an English list: ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def digits(value: float) -> str:
    """A non-negative number to three digits."""
    if value <= 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(value) + 1e-9))
    return f"{value:.{min(places, 6)}f}"
