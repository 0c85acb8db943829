"""Scripts modelled on Colossal-AI's public AMP examples run on the drop-in, with their import lines unchanged."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.processes import run_ranks
from tests.soak import each_value, every

SCRIPTS = Path(__file__).parent / "colossalai_scripts"

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


INSTALL = "import castwise.bridges.compat\n\ncastwise.compat.install('colossalai')\n"
"""The lines added at the start of a script; they also run in its data-loading workers."""


def run_script(words: list[str]) -> None:
    sys.argv[:] = words
    sys.path.insert(0, str(Path.cwd()))  # as Python does for scripts
    runpy.run_path(words[0], run_name="__main__")


def said_by(script: str, config: str, folder: Path, *words: str, size: int = 1) -> str:
    """Run a script in ``size`` processes, with a configuration file beside it, and return the output."""
    shutil.copy(SCRIPTS / "synthetic.py", folder)
    (folder / script).write_text(INSTALL + (SCRIPTS / script).read_text())
    imports = "from pathlib import Path\nfrom colossalai.amp.amp_type import AMP_TYPE\n"
    (folder / "config.py").write_text(imports + textwrap.dedent(config))
    ranks = run_ranks(run_script, [str(folder / script), *words], folder, size)
    said = "".join(rank.said(stream) for rank in ranks for stream in ("out", "err"))
    assert [rank.code for rank in ranks] == [0] * size, said
    return said


def numbers(pattern: str, said: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, said)]


@every(2)
@pytest.mark.parametrize(
    ("mode", "words", "size"),
    [
        ("TORCH", (), 1),
        ("APEX", (), 2),
        ("APEX, opt_level='O2'", ("--use_trainer",), 1),
        ("NAIVE", ("--use_trainer",), 1),
    ],
)
def test_the_resnet(mode: str, words: tuple[str, ...], size: int, tmp_path: Path) -> None:
    config = f"""
        BATCH_SIZE = 32
        NUM_EPOCHS = 3
        fp16 = dict(mode=AMP_TYPE.{mode})
    """
    said = said_by("resnet.py", config, tmp_path, *words, size=size)
    if words:
        losses, right = numbers(r"Train\]: Loss = ([\d.]+)", said), numbers(r"Accuracy = ([\d.]+)", said)
    else:
        losses, right = numbers(r"train loss: ([\d.]+)", said), numbers(r"acc: ([\d.]+)", said)
    assert len(losses) == len(right) == 3
    assert losses[-1] < losses[0]
    assert right[-1] > 0.6  # 0.25 for random guesses among four classes


@each_value()
@pytest.mark.parametrize(
    ("config", "size"),
    [
        ("clip_grad_norm = 0.1\nBY_HAND, WORKERS = 0.0, 1\nfp16 = dict(mode=AMP_TYPE.TORCH)", 1),
        ("clip_grad_norm = 0.1\nBY_HAND, WORKERS = 0.0, 0\nfp16 = dict(mode=AMP_TYPE.APEX)", 2),
        ("BY_HAND, WORKERS = 0.1, 0\nfp16 = dict(mode=AMP_TYPE.APEX)", 1),
        ("BY_HAND, WORKERS = 0.1, 0\nfp16 = dict(mode=AMP_TYPE.APEX)", 2),
    ],
)
def test_the_clipping(config: str, size: int, tmp_path: Path) -> None:
    """Each step that is not skipped changes the weights by the clipped norm, clipped by the engine or by hand."""
    said = said_by(
        "clipping.py", f"BATCH_SIZE = 32\nNUM_EPOCHS = 8\nRATE = 0.1\n{config}", tmp_path, size=size
    )
    updates = numbers(r"update: ([\d.]+)", said)
    assert len(updates) == 4 * size
    made = [update for update in updates if update]
    assert len(made) >= 2 * size  # other steps overflow until the loss scale has fallen
    assert made == pytest.approx([0.1] * len(made), rel=1e-2)


@every(2)
@pytest.mark.parametrize("mode", ["TORCH", "NAIVE"])
def test_the_masked_autoencoder(mode: str, tmp_path: Path) -> None:
    config = f"""
        gradient_accumulation = 1
        fp16 = dict(mode=AMP_TYPE.{mode})
        BATCH_SIZE = 32
        LEARNING_RATE = 0.003
        WEIGHT_DECAY = 0.05
        MASK_RATIO = 0.75
        CHECKPOINT_INTERVAL = 20
        OUTPUT_DIR = Path("output")
        NUM_EPOCHS = 4
        RESUME = False
    """
    words = ("--config", "config.py")
    first = numbers(r"epoch \d, loss ([\d.]+)", said_by("mae.py", config, tmp_path, *words))
    assert len(first) == 4
    assert first[-1] < first[0]
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == [
        "checkpoint-0.pth",
        "checkpoint-3.pth",
    ]
    more = "RESUME = True\nRESUME_DIR = OUTPUT_DIR / 'checkpoint-3.pth'\nNUM_EPOCHS = 5\n"
    said = said_by("mae.py", textwrap.dedent(config) + more, tmp_path, *words)
    assert "start epoch 4" in said
    (again,) = numbers(r"epoch 4, loss ([\d.]+)", said)
    assert again < first[0]
    assert again == pytest.approx(first[-1], rel=0.25)


@every(2)
@pytest.mark.parametrize(("mode", "size"), [("TORCH", 1), ("APEX", 2)])
def test_simclr(mode: str, size: int, tmp_path: Path) -> None:
    """The scripts train on two views with a contrastive loss, then a classifier on the learned features."""
    config = f"""
        LOG_NAME = "simclr"
        BATCH_SIZE = 32
        NUM_EPOCHS = 4
        LEARNING_RATE = 0.1
        WEIGHT_DECAY = 0.0005
        MOMENTUM = 0.9
        fp16 = dict(mode=AMP_TYPE.{mode})
        dataset = dict(root="./dataset")
        gradient_accumulation = 2
        clip_grad_norm = 1.0
    """
    said = said_by("simclr.py", config, tmp_path, size=size)
    assert f"Total batch size = {64 * size}" in said
    losses = numbers(r"Train\]: Loss = ([\d.]+)", said)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert len(list((tmp_path / "ckpt" / "simclr").glob("step-*"))) == 2
    assert any((tmp_path / "tb_logs" / "simclr").rglob("events.*"))
    if size == 1:
        right = numbers(r"Accuracy = ([\d.]+)", said_by("linear.py", config, tmp_path))
        assert len(right) == 4
        assert right[-1] > 0.6
