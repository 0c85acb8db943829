"""The heap of this process: whether freed host memory stays in it.

glibc returns memory to the system once 64 MiB are free at the end of the heap, so that the tensors of every training step on a
CPU cause page faults again: a tenth of a step of BERT or of ResNet. With this setting, glibc keeps the memory and reuses it.
Results do not change and the peak is about the same, but other processes get less memory.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from functools import cache
from typing import Any, Final

__all__ = ["HEAP", "Heap", "can_keep"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt``, as ``malloc.h`` numbers them."""
_LARGEST: Final = 32 << 20
"""The largest block size that stays on the heap, and so the largest block that is kept after it is freed.

Larger blocks have their own mapping and return to the system when freed. On the heap, blocks of changing sizes
between long-lived blocks would leave holes that no other block fits into.
"""
_NUMBER: Final = re.compile("0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*")
"""A number as glibc reads it."""
_USUAL: Final = {
    _MMAP_THRESHOLD: ("mmap_threshold", _LARGEST),
    _TRIM_THRESHOLD: ("trim_threshold", 2 * _LARGEST),
}
"""Names of the tunables, and the end points of glibc's own adjustment, which cannot be re-enabled once a parameter is set."""


@cache
def _glibc() -> Any:
    """The C library if it is glibc, else None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def can_keep() -> bool:
    """Whether the C library can be told to keep freed memory: only glibc can."""
    return _glibc() is not None


def _given(name: str) -> int | None:
    """A parameter's value in the environment, from ``GLIBC_TUNABLES`` or from its own variable."""
    said = [os.environ.get(f"MALLOC_{name.upper()}_", "")]
    for tunable in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        key, _, value = tunable.partition("=")
        said += [value] if key == f"glibc.malloc.{name}" else []
    for text in reversed(said):
        if _NUMBER.fullmatch(text):
            return int(text, 16 if text[:2] in ("0x", "0X") else 8 if text[0] == "0" else 10)
    return None


class Heap:
    """The process-wide setting for freed memory.

    Attributes:
        host_memory: ``as_given``, or ``keep``; setting it takes effect at once.
    """

    def __init__(self) -> None:
        self._mode = "as_given"

    @property
    def host_memory(self) -> str:
        """The last setting."""
        return self._mode

    @host_memory.setter
    def host_memory(self, mode: str) -> None:
        library = _glibc()
        self._mode = mode
        if mode == "keep":
            library.mallopt(_MMAP_THRESHOLD, _LARGEST)
            library.mallopt(_TRIM_THRESHOLD, -1)
        else:
            for parameter, (name, usual) in _USUAL.items():
                given = _given(name)
                library.mallopt(parameter, usual if given is None else min(given, 2**31 - 1))
            library.malloc_trim(0)


HEAP: Final = Heap()
