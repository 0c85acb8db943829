"""The hands-on of examples/ runs under torchrun as its README shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "colossalai"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
]


def torchrun(script: str, config: Path) -> str:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(EXAMPLES / script), "--config", str(config),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


@pytest.mark.parametrize(
    ("script", "mode"),
    [
        ("train_with_engine.py", "torch"),
        ("train_with_engine.py", "naive"),
        ("train_with_trainer.py", "apex"),
    ],
)
def test_the_hands_on_learns(script: str, mode: str, tmp_path: Path) -> None:
    """Two epochs of the example's own configuration."""
    own = (EXAMPLES / "config" / f"config_{mode}.py").read_text()
    config = tmp_path / f"config_{mode}.py"
    config.write_text(re.sub(r"NUM_EPOCHS = \d+", "NUM_EPOCHS = 2", own))
    assert config.read_text() != own
    said = torchrun(script, config)
    found = re.findall(
        r"epoch: \d, loss: ([\d.]+)" if "engine" in script else r"Train\]: Loss = ([\d.]+)", said
    )
    losses = [float(loss) for loss in found]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert losses[1] < 2.3  # of ten digits guessed blindly
