"""A part of the suite on the simulated accelerator, in its own process, because autograd starts device threads once.

Tests with ranks take as long as all others together; ``make test DEVICE=sim`` runs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import sim
from tests.here import DEVICE


@pytest.mark.skipif(DEVICE != "cpu", reason="this run uses another device already")
@pytest.mark.skipif(sim.compiler() is None, reason=sim.NO_COMPILER)
@pytest.mark.parametrize(
    ("files", "fp64"),
    [("tests/device", "1"), ("tests/device/test_without_fp64.py", "0")],
    ids=["", "without fp64"],
)
def test_castwise_on_a_simulated_accelerator(files: str, fp64: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            files,
            "--ignore=tests/device/test_ranks.py",
        ],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "CASTWISE_TEST_DEVICE": "sim", "CASTWISE_SIM_FP64": fp64, "PYTEST_ADDOPTS": ""},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
