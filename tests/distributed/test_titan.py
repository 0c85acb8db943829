"""The example of a training loop in torchtitan's style, unchanged."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.processes import run_ranks, run_script
from tests.soak import soaks

SCRIPT = Path(__file__).parents[2] / "examples" / "fsdp2_titan.py"


def losses(folder: Path, *words: str, ranks: int = 2) -> dict[int, str]:
    """Run the example, which saves into the folder; return the losses it prints by step."""
    folder.mkdir(exist_ok=True)
    ran = run_ranks(
        run_script,
        [str(SCRIPT), "--steps", "12", "--save-every", "6", "--out", "saved", *words],
        folder,
        ranks,
    )
    assert [rank.code for rank in ran] == [0] * ranks, "\n".join(rank.said("err")[-3000:] for rank in ran)
    return {
        int(step): loss
        for step, loss in re.findall(r"^step (\d+) loss (\S+)", ran[0].said("out"), re.MULTILINE)
    }


def test_it_resumes_with_the_same_digits_and_under_another_plan(tmp_path: Path) -> None:
    whole = losses(tmp_path / "whole", "--plan", "fp16-master")
    assert list(whole) == list(range(1, 13))
    for name in ("again", "other"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        shutil.rmtree(tmp_path / name / "saved" / "step-00000012")
    then = losses(tmp_path / "again", "--plan", "fp16-master")
    assert then == {step: whole[step] for step in range(7, 13)}

    other = losses(tmp_path / "other", "--plan", "bf16-mixed")
    assert list(other) == list(range(7, 13))
    for step, loss in other.items():
        assert float(loss) == pytest.approx(float(whole[step]), rel=2e-3)  # bf16 has 8 bits
        assert loss != whole[step]


@soaks  # otherwise test_layouts.py compares sharded training with accumulation to one process
def test_two_processes_train_what_one_trains(tmp_path: Path) -> None:
    """The microbatches are the same; one process takes twice as many of them per step."""
    two = losses(tmp_path / "two", "--plan", "fp32", "--stop", "6")
    one = losses(tmp_path / "one", "--plan", "fp32", "--stop", "6", "--accumulate", "4", ranks=1)
    assert {k: float(v) for k, v in one.items()} == pytest.approx(
        {k: float(v) for k, v in two.items()}, rel=1e-5
    )
    assert float(two[6]) < float(two[1])
