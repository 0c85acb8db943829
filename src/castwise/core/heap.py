"""Make the C library keep freed host memory in the process, instead of returning it to the operating system.

glibc returns memory to the system once 64 MiB are free at the end of the heap. So the tensors of every training step
on a CPU cause page faults again, which take a tenth of a step of BERT or of ResNet. With this setting, glibc keeps
the memory and reuses it. Results do not change and the peak is about the same, but other processes get less memory.
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
"""The numbers of two parameters of ``mallopt``, from ``malloc.h``."""
_LARGEST: Final = 32 << 20
"""The largest size in bytes of a memory block on the heap, and so of a block that is kept after it is freed.

A larger block has its own mapping and returns to the system when it is freed. If larger blocks of changing sizes were
on the heap between long-lived blocks, they would leave holes that no other block fits into.
"""
_NUMBER: Final = re.compile("0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*")
"""The numbers that glibc reads from an environment variable."""
_USUAL: Final = {
    _MMAP_THRESHOLD: ("mmap_threshold", _LARGEST),
    _TRIM_THRESHOLD: ("trim_threshold", 2 * _LARGEST),
}
"""For each parameter, the name of its tunable, and the value with which ``as_given`` restores glibc's behaviour.

The value is the end point of glibc's own adjustment, which cannot be re-enabled once a parameter was set."""


@cache
def _glibc() -> Any:
    """Return the C library if it is glibc, or None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def can_keep() -> bool:
    """Whether the C library can be told to keep freed memory. Only glibc can."""
    return _glibc() is not None


def _given(name: str) -> int | None:
    """Return the value that the environment gives to a parameter of glibc's malloc, or None if there is none.

    It is read from ``GLIBC_TUNABLES``, or else from the parameter's own environment variable.
    """
    said = [os.environ.get(f"MALLOC_{name.upper()}_", "")]
    for tunable in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        key, _, value = tunable.partition("=")
        said += [value] if key == f"glibc.malloc.{name}" else []
    for text in reversed(said):
        if _NUMBER.fullmatch(text):
            return int(text, 16 if text[:2] in ("0x", "0X") else 8 if text[0] == "0" else 10)
    return None


class Heap:
    """The process-wide setting that says what happens to freed host memory.

    Attributes:
        host_memory: ``as_given``, or ``keep`` to keep freed memory in the process. Setting it takes effect at once.
    """

    def __init__(self) -> None:
        self._mode = "as_given"

    @property
    def host_memory(self) -> str:
        """The current setting, ``as_given`` or ``keep``."""
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
