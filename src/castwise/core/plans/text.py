"""Read untrusted JSON and globs, and show values in error messages, without importing torch."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

DEEPEST: Final = 50
"""The largest nesting depth of a plan's JSON. Code that traverses it thus stays below Python's recursion limit."""
LARGEST: Final = 10**1000
"""Integers of this size or larger are refused, since Python prints no integer of more than 4,300 digits."""
_CONTAINERS: Final = (Mapping, list, tuple)


class _Shown(reprlib.Repr):
    """A variant of ``repr`` whose result is short, and quickly made, for any value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring, self.maxother, self.maxlong = 120, 400, 400
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 20

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if abs(x) < LARGEST else f"a number of {x.bit_length():,} bits"


shown = _Shown().repr
"""Return the ``repr`` of a value for an error message, shortened if the value is long or deeply nested."""


def is_encodable(text: str) -> bool:
    """Whether text can be written as UTF-8.

    The names of files may not be: Python represents bytes in them that are not UTF-8 as surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def close_matches(value: object, options: Iterable[str]) -> str:
    """Return ``" (did you mean 'a' or 'b'?)"`` with the options most similar to a value, or an empty text."""
    text = value if isinstance(value, str) else shown(value)
    close = difflib.get_close_matches(text, list(options), n=2) if len(text) < 100 else []
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def some(names: Sequence[str], most: int = 5) -> str:
    """Join names as ``a, b and 3 more``, with at most ``most`` of them listed."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def read_json(text: str, deepest: int = DEEPEST) -> Any:
    """Read JSON text that may be malformed or hostile.

    NaN and the infinities are accepted, as by Python's ``json``.

    Raises:
        ValueError: The text is not JSON, a key is given twice, a number is too long, or values are nested deeper than
            ``deepest``. The message says which, and where the text stops being JSON.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"JSON nested more than {deepest} levels deep") from None
    except (
        ValueError
    ) as error:  # Python's limit on digits, above which reading takes quadratic time, or a key given twice
        said = "it has a number with too many digits" if "digits" in str(error) else str(error)
        raise ValueError(f"ambiguous JSON: {said}") from None
    if nested_deeper(value, deepest):
        raise ValueError(f"JSON nested more than {deepest} levels deep")
    return value


def nested_deeper(value: Any, levels: int) -> bool:
    """Whether lists and mappings are nested more than ``levels`` deep.

    This is checked without recursion, so it works at any depth.
    """
    inside = [value]
    for _ in range(levels):
        inside = [
            item
            for outer in inside
            if isinstance(outer, _CONTAINERS)
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
    return any(isinstance(item, _CONTAINERS) for item in inside)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in values if keys.count(key) > 1)
        raise ValueError(f"it gives the key {shown(twice)} twice")
    return values


def matches_path(glob: str, path: str) -> bool:
    """Whether a glob matches a whole module path, such as ``encoder.layers.0.norm``.

    ``*`` stands for any characters and ``?`` for one, except dots; ``**`` stands for any characters, dots too.
    """
    return _compiled(glob).fullmatch(path) is not None


@lru_cache(maxsize=4096)
def _compiled(glob: str) -> re.Pattern[str]:
    """Compile a glob into a regular expression whose matching time is not exponential in the number of wildcards.

    After a ``*``, and for a part between two ``**``, the first match leaves the most text for the rest of the glob. So
    no other match is tried, which ``(?>...)`` expresses. Only the part that must reach the end of the path needs
    backtracking.
    """

    def fit(first: str, *further: str) -> str:
        return first + "".join(f"(?>[^.]*?{part})" for part in further)

    *before, (*start, end) = [
        ["[^.]".join(map(re.escape, part.split("?"))) for part in stretch.split("*")]
        for stretch in re.split(r"\*\*+", glob)
    ]
    expression = f"{fit(*start)}[^.]*{end}" if start else end
    if before:
        first, *further = before
        between = "".join(f"(?>.*?{fit(*parts)})" for parts in further)
        expression = f"{fit(*first)}{between}.*{expression}"
    return re.compile(expression, re.DOTALL)
