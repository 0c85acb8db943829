"""The heap of this process: whether freed host memory stays in it.

glibc gives memory back to the system once 64 MiB of it are free at the end of the heap, so that the tensors of every training
step on a CPU meet page faults anew: a tenth of a step of BERT or of ResNet. Told to keep what it has, it hands that out again.
No number changes and the peak is about the same; what other processes get is not.
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
"""The largest block that glibc can be told not to map for itself, and the largest that is kept.

Larger ones are mapped for themselves, and go back when they are free. On the heap, blocks of changing sizes and what lasts
between them leave holes that no other fits into.
"""
_NUMBER: Final = re.compile("0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*")
"""As glibc reads one."""
_USUAL: Final = {
    _MMAP_THRESHOLD: ("mmap_threshold", _LARGEST),
    _TRIM_THRESHOLD: ("trim_threshold", 2 * _LARGEST),
}
"""What tunables call them, and where glibc's own adjustment ends, which nothing can switch on again once one is set."""


@cache
def _glibc() -> Any:
    """The C library if it is glibc, else None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def can_keep() -> bool:
    """Whether the C library can be told to keep freed memory: it must be glibc."""
    return _glibc() is not None


def _given(name: str) -> int | None:
    """The environment's value of a parameter, from ``GLIBC_TUNABLES`` or from its own variable."""
    said = [os.environ.get(f"MALLOC_{name.upper()}_", "")]
    for tunable in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        key, _, value = tunable.partition("=")
        said += [value] if key == f"glibc.malloc.{name}" else []
    for text in reversed(said):
        if _NUMBER.fullmatch(text):
            return int(text, 16 if text[:2] in ("0x", "0X") else 8 if text[0] == "0" else 10)
    return None


class Heap:
    """The setting for freed memory, one per process.

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
