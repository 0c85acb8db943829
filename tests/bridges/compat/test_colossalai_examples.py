"""The tutorial in examples/colossalai runs; in a soak under torchrun, otherwise in forked ranks."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.processes import run_ranks, run_script
from tests.soak import SOAKING, some

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "colossalai"
WIDTH = 32
"""The model's width in these tests; the example has 64."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
]


def run_example(words: list[str]) -> None:
    """Run the example; except in a soak, with a narrower model, since fp16 products are slow on a CPU."""
    if not SOAKING:
        sys.path.insert(0, str(EXAMPLES))
        import vit

        vit.ViT = functools.partial(vit.ViT, width=WIDTH, layers=1)
    run_script(words)


def two_ranks(script: str, config: Path) -> str:
    words = [str(EXAMPLES / script), "--config", str(config)]
    ranks = run_ranks(run_example, words, config.parent, 2)
    said = "".join(rank.said(stream) for stream in ("out", "err") for rank in ranks)
    assert [rank.code for rank in ranks] == [0, 0], said
    return said


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
    ("script", "mode", "run"),
    some(
        [
            ("train_with_engine.py", "naive", two_ranks),
            ("train_with_engine.py", "torch", two_ranks),
            ("train_with_trainer.py", "apex", torchrun if SOAKING else two_ranks),
        ],
        3,
    ),
)
def test_the_hands_on_learns(script: str, mode: str, run: Callable[[str, Path], str], tmp_path: Path) -> None:
    """The loss falls in two epochs of the example's own configuration."""
    own = (EXAMPLES / "config" / f"config_{mode}.py").read_text()
    config = tmp_path / f"config_{mode}.py"
    config.write_text(re.sub(r"NUM_EPOCHS = \d+", "NUM_EPOCHS = 2", own))
    assert config.read_text() != own
    said = run(script, config)
    found = re.findall(
        r"epoch: \d, loss: ([\d.]+)" if "engine" in script else r"Train\]: Loss = ([\d.]+)", said
    )
    losses = [float(loss) for loss in found]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert losses[1] < 2.3  # ln 10, for random guesses
