"""A training job that resumes from its newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.here import DEVICE

from castwise.commands.jobs.train import train
from castwise.errors import CheckpointError, PlanError

WORKLOAD = "gpt?layers=1&width=16&context=16&batch=4"


def lines(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["elapsed_s"]
    return rows


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)


@pytest.mark.parametrize("plan", ["fp32", "fp16-master"])
def test_what_was_stopped_and_resumed_is_what_ran_through(tmp_path: Path, plan: str) -> None:
    through, halves = tmp_path / "through", tmp_path / "halves"
    train(WORKLOAD, plan, steps=8, out=through, device=DEVICE)
    train(WORKLOAD, plan, steps=5, out=halves, device=DEVICE, save_every=3)
    # A killed process leaves a line of a step that was lost, and an incomplete line.
    with (halves / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    result = train(WORKLOAD, plan, steps=8, out=halves, device=DEVICE, save_every=3, resume=True)
    assert (result.steps_before, result.steps_done) == (5, 8)
    assert lines(halves) == lines(through)
    for name, value in weights(through).items():
        assert torch.equal(weights(halves)[name], value), name
    assert sorted(p.name for p in (halves / "checkpoints").glob("step-*")) == [
        "step-00000006",
        "step-00000008",
    ]


def test_a_training_that_is_over_is_only_evaluated_again(tmp_path: Path) -> None:
    first = train(WORKLOAD, "bf16-mixed", steps=4, out=tmp_path, device=DEVICE, save_every=4)
    again = train(WORKLOAD, "bf16-mixed", steps=4, out=tmp_path, device=DEVICE, save_every=4, resume=True)
    assert (again.steps_before, again.steps_done) == (4, 4)
    assert again.metrics == first.metrics
    assert again.final_loss == first.final_loss


def test_without_a_checkpoint_it_starts_from_the_beginning(tmp_path: Path) -> None:
    result = train(WORKLOAD, "fp32", steps=2, out=tmp_path, device=DEVICE, resume=True)
    assert (result.steps_before, result.steps_done) == (0, 2)


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path) -> None:
    train(WORKLOAD, "fp32", steps=4, out=tmp_path, device=DEVICE, save_every=2)
    damaged = next((tmp_path / "checkpoints" / "step-00000004").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-10])
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    with pytest.warns(UserWarning, match=r"skipped step-0000000(4|9)") as caught:
        result = train(WORKLOAD, "fp32", steps=5, out=tmp_path, device=DEVICE, resume=True)
    said = " ".join(str(warning.message) for warning in caught)
    assert "step-00000004" in said
    assert "step-00000009" in said
    assert result.steps_before == 2
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_nothing_is_thrown_away_unasked(tmp_path: Path) -> None:
    train(WORKLOAD, "fp32", steps=2, out=tmp_path, device=DEVICE, save_every=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"was saved at step 2\. Continue it with --resume"):
        train(WORKLOAD, "fp32", steps=4, out=tmp_path, device=DEVICE)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_another_training_is_not_gone_on_with(tmp_path: Path) -> None:
    train(WORKLOAD, "fp32", steps=2, out=tmp_path, device=DEVICE, save_every=2)
    with pytest.raises(
        CheckpointError, match=r"with seed 0, but this training has workload 'gpt' with seed 1"
    ):
        train(WORKLOAD, "fp32", steps=4, out=tmp_path, device=DEVICE, seed=1, resume=True)


def test_a_number_of_steps_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"train\(save_every=-1\)"):
        train(WORKLOAD, "fp32", steps=2, out=tmp_path, device=DEVICE, save_every=-1)
