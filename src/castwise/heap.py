"""The heap of this process: whether the memory that tensors on the host give back stays in it.

glibc gives large blocks back to the system as soon as they are free, so that the tensors of every training step on a CPU meet
page faults anew: half a microsecond to one and a half per 4 KiB, a tenth of a step of BERT and half of one of convolutions. Told
to keep them, it hands them out again. No number changes and the peak is about the same; what other processes get is not.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from functools import cache
from typing import Any, Final

__all__ = ["HEAP", "Heap", "can_keep"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of ``mallopt``, as ``malloc.h`` numbers them."""
_NUMBER: Final = re.compile("0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*")
"""As glibc reads one."""
_USUAL: Final = {
    _MMAP_THRESHOLD: ("mmap_threshold", 32 << 20),
    _TRIM_THRESHOLD: ("trim_threshold", 64 << 20),
    _MMAP_MAX: ("mmap_max", 65536),
}
"""What tunables call them, and where glibc's own adjustment ends, which nothing can switch on again once one is set."""


@cache
def _glibc() -> Any:
    """The C library, where it is glibc; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def can_keep() -> bool:
    """Whether this process can be told to keep memory: its C library is glibc."""
    return _glibc() is not None


GROWTH = 1.5
"""So many times what a step took may be resident before free memory goes back."""
_LEAST = 64 << 20


def _resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _given(name: str) -> int | None:
    """What the environment says of a parameter, as a tunable (``GLIBC_TUNABLES``) or by a variable of its own."""
    said = [os.environ.get(f"MALLOC_{name.upper()}_", "")]
    for tunable in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        key, _, value = tunable.partition("=")
        said += [value] if key == f"glibc.malloc.{name}" else []
    for text in reversed(said):
        if _NUMBER.fullmatch(text):
            return int(text, 16 if text[:2] in ("0x", "0X") else 8 if text[0] == "0" else 10)
    return None


class Heap:
    """What is done with memory that is free again: one for the process.

    Attributes:
        host_memory: ``as_given``, or ``keep``; setting it takes effect at once.
    """

    def __init__(self) -> None:
        self._mode = "as_given"
        self._usual, self._least = 0, 0

    @property
    def host_memory(self) -> str:
        """As it was set last."""
        return self._mode

    @host_memory.setter
    def host_memory(self, mode: str) -> None:
        library = _glibc()
        self._mode, self._usual, self._least = mode, 0, 0
        if mode == "keep":
            library.mallopt(_MMAP_MAX, 0)  # a block that is mapped for itself goes back when it is free
            library.mallopt(_TRIM_THRESHOLD, -1)
        else:
            for parameter, (name, usual) in _USUAL.items():
                given = _given(name)
                library.mallopt(parameter, usual if given is None else min(given, 2**31 - 1))
            library.malloc_trim(0)

    def relieve(self) -> None:
        """After a step: where kept memory has grown far beyond what a step took, give back what is free, once.

        Blocks of changing sizes leave holes that the next do not fit into, once something small and lasting lies between.
        """
        if self._mode != "keep" or not (resident := _resident()):
            return
        if not self._usual:  # the first step, or one from which on nothing free was left
            self._least = min(self._least or resident, resident)
            self._usual = max(self._least, _LEAST)
        elif resident > GROWTH * self._usual:
            _glibc().malloc_trim(0)
            self._usual = 0  # what the next step takes tells


HEAP: Final = Heap()
