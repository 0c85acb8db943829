"""The process in which :func:`castwise.measure.memory.measure_memory` measures; not a command for people."""

from __future__ import annotations

import sys

from castwise.measure.memory import main

if __name__ == "__main__":
    main(sys.argv[1])
