"""Run code in a Python process of its own, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"


def run_python(code: str, cwd: Path, *flags: str) -> str:
    """What ``code`` prints in a fresh interpreter that is started in ``cwd`` with ``flags``."""
    done = subprocess.run(
        [sys.executable, *flags, "-"],
        input=code,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
