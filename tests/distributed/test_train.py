"""``train`` on several real processes trains as on one."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from castwise.commands.jobs.layouts import Whole, build_whole
from castwise.commands.jobs.processes import join
from castwise.commands.jobs.train import train
from castwise.core.session import Amp
from castwise.errors import NonFiniteError, PatternError, PlanError, WorkloadError
from castwise.lab.workloads.workload import Pipeline, Workload, find_workload
from tests.distributed.world import World
from tests.processes import Forked, command
from tests.soak import pairs, some

GPT = "gpt?layers=4&width=32&heads=2&context=16&batch=8"
VIT = "digits?model=vit&width=16&batch=32"
STEPS = 6
TOLERANCE = {"fp32": 1e-6, "bf16-mixed": 2e-3, "fp16-mixed": 2e-4, "bf16-master": 2e-3}
"""Relative tolerance of losses: sums over processes have another order, and low formats round them."""
DRIFT = {"fp32": 5e-6, "bf16-mixed": 2e-2, "fp16-mixed": 2e-3, "bf16-master": 2e-2}
"""Tolerance of weights, relative to the distance that training moved them."""

TWO: list[dict[str, Any]] = [
    {"layout": layout, "plan": plan}
    for layout, plan in pairs(("dp2", "fsdp2", "tp2", "pp2"), ("fp32", "fp16-mixed", "bf16-master"))
] + some(
    [
        {"layout": None, "plan": "fp32"},
        {"layout": "pp2", "plan": "fp32", "schedule": "gpipe", "microbatches": 1},
        {"layout": "pp2", "plan": "fp16-mixed", "schedule": "interleaved"},
        {"layout": "pp2", "plan": "bf16-mixed+regions.blocks.0=fp32"},
        {"layout": "tp2", "plan": "fp32", "workload": VIT},
        {"layout": "pp2", "plan": "fp32", "workload": VIT},
    ],
    2,
)
FOUR: list[dict[str, Any]] = some(
    [
        {"layout": "dp2xtp2", "plan": "fp16-mixed"},
        {"layout": "fsdp2xtp2", "plan": "fp16-mixed"},
        {"layout": "dp2xfsdp2", "plan": "bf16-mixed"},
        {"layout": "dp2xpp2", "plan": "fp16-mixed"},
        {"layout": "fsdp2xpp2", "plan": "bf16-mixed+regions.blocks.3=fp32"},
        {"layout": "tp2xpp2", "plan": "fp16-mixed"},
    ],
    4,
)


def _name(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def _sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD: unlike AdamW's, its steps depend on the size of a gradient and do not amplify rounding errors."""
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def _job(case: dict[str, Any]) -> Workload:
    return replace(find_workload(case.get("workload", GPT)), optimizer=_sgd)


def _nan_below(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches with NaN in the fourth, only in rows of the last rank."""
    for number, (inputs, targets) in enumerate(find_workload(VIT).batches(seed), 1):
        inputs = inputs.clone()
        inputs[-1, 0, 0, 0] = math.nan if number == 4 else 0.0
        yield inputs, targets


def _faults(_rank: int, _world: int, folder: Path) -> None:
    """Check errors that all ranks raise in the same words."""

    def refused(kind: type[Exception], words: str, workload: Any, plan: str, **options: Any) -> None:
        with pytest.raises(kind, match=words):
            train(workload, plan, steps=9, out=folder / "faults", device="cpu", **options)

    refused(
        WorkloadError, r"shape \[7, 16\] .* among 2 data-parallel", GPT.replace("batch=8", "batch=7"), "fp32"
    )
    refused(
        WorkloadError, r"3 heads cannot be cut", GPT.replace("32&heads=2", "48&heads=3"), "fp32", layout="tp2"
    )
    refused(WorkloadError, r"use --microbatches 4", GPT, "fp32", layout="pp2", microbatches=3)
    refused(WorkloadError, r"the stages 0, 2, 3 share embedding.weight", _tied(), "fp32", layout="pp2",
            schedule="interleaved")  # fmt: skip
    refused(PlanError, r"schedule='fast'\) is not allowed", GPT, "fp32", layout="pp2", schedule="fast")
    refused(PlanError, r"layout single: needs 1 process", GPT, "fp32", layout="single")
    refused(PatternError, r"nowhere", GPT, "bf16-mixed+regions.nowhere=fp32", layout="pp2")
    bad = replace(find_workload(VIT), batches=_nan_below)
    for layout in ("dp2", "pp2"):
        refused(
            NonFiniteError, r"step 4 is nan: its data .* batch\[0\] \(1 of 2048", bad, "fp32", layout=layout
        )


def _tied() -> Workload:
    """Return a workload with a parameter in the first and third of four stages, on one process when interleaved."""
    gpt = find_workload(GPT)
    assert gpt.pipeline is not None

    def split(model: nn.Module, stages: int) -> list[nn.Module]:
        first, *others, last = gpt.pipeline.split(model, stages)
        others[1].embedding = model.embedding
        return [first, *others, last]

    return replace(gpt, pipeline=replace(gpt.pipeline, split=split))


def _infinite_piece(rank: int, _world: int) -> None:
    """An infinity in one rank's piece of a sharded layer makes both ranks skip, whatever precedes it in the optimizer."""
    with join("tp2", torch.device("cpu")) as ranks, Amp("fp16-mixed", device="cpu") as amp:
        # Reversed, a bias that all ranks have comes first, and sharded parameters come after it.
        workload = replace(find_workload(GPT), optimizer=lambda params: _sgd(list(params)[::-1]))
        parts = Whole(workload, amp, build_whole(workload, ranks, seed=0), ranks)
        batch = next(workload.batches(0))
        skipped = []
        for plant in ("", "blocks.1.mlp.0.weight", "blocks.0.attention.out.weight", ""):
            parts.backward(batch)
            if plant and rank == 1:
                parts.modules[0].get_parameter(plant).grad.to_local()[0, 0] = math.inf
            skipped.append(amp.step(*parts.optimizers).skipped)
            parts.optimizers[0].zero_grad()
        assert skipped == [False, True, True, False], (rank, skipped)


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def _statistics(rank: int, _world: int, folder: Path) -> None:
    """Check that a pipeline's BatchNorm has counted the microbatches, but not torch's pass for finding shapes."""
    workload = replace(
        find_workload(f"{Path(__file__).parents[1]}/commands/jobs/tiny_workloads.py:mlp"),
        model=_normalised,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        pipeline=Pipeline(
            lambda m, _: [m[:1], m[1:]], lambda b: (b[0],), lambda b: b[1], nn.functional.mse_loss
        ),
    )
    train(workload, "fp32", steps=2, out=folder / "norm", device="cpu", layout="pp2", microbatches=4)
    torch.manual_seed(0)
    model = _normalised()
    for inputs, _ in itertools.islice(workload.batches(0), 2):
        for part in inputs.chunk(4):
            model(part)
    if rank == 0:
        torch.testing.assert_close(
            torch.load(folder / "norm" / "model.pt", weights_only=True), model.state_dict()
        )


def _undrawn(*_: object) -> Path:
    return Path("curves.png")


def _train(rank: int, _world: int, folder: str, cases: list[dict[str, Any]]) -> None:
    for number, case in enumerate(cases):
        options = {key: value for key, value in case.items() if key != "workload"}
        out = Path(folder, _name(case))
        with pytest.MonkeyPatch.context() as patch:
            if number:  # plotting takes longer than training; once is enough
                patch.setattr("castwise.report.train.plot_curves", _undrawn)
            result = train(_job(case), steps=STEPS, out=out, device="cpu", seed=3, **options)
        dist.barrier()  # rank 0 may still be writing
        # All ranks know the losses; only rank 0 evaluates and writes.
        losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert result.final_loss == losses[-1]
        assert bool(result.files) == bool(result.metrics) == (rank == 0)


def _compare(world: World, folder: Path, cases: list[dict[str, Any]]) -> None:
    world.run(_train, str(folder), cases)
    alone: dict[tuple[str, str], Path] = {}
    for case in cases:
        job = (case.get("workload", GPT), case["plan"])
        if job not in alone:
            alone[job] = folder / f"alone{len(alone)}"
            train(_job(case), case["plan"], steps=STEPS, out=alone[job], device="cpu", seed=3)
        _same(folder / _name(case), alone[job], world.size, case)


def _same(found: Path, alone: Path, world: int, case: dict[str, Any]) -> None:
    plan = case["plan"].split("+")[0]
    near = TOLERANCE[plan]
    got, want = (json.loads((path / "result.json").read_text()) for path in (found, alone))
    assert got["status"] == "ok"
    assert got["layout"] == (case["layout"] or f"dp{world}")
    assert got["world_size"] == world
    assert want["layout"] == "single"
    assert want["world_size"] == 1
    rows, lone = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (found, alone)
    )
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in lone], rel=near), case
    assert [row["loss_scale"] for row in rows] == [row["loss_scale"] for row in lone], case
    assert got["metrics"] == pytest.approx(want["metrics"], rel=near), case
    weights, lone_weights = (torch.load(path / "model.pt", weights_only=True) for path in (found, alone))
    assert weights.keys() == lone_weights.keys()
    torch.manual_seed(3)
    start = find_workload(case.get("workload", GPT)).model().state_dict()
    apart = moved = 0.0
    for key, value in weights.items():
        assert type(value) is torch.Tensor
        assert value.dtype is torch.float32
        assert value.shape == start[key].shape
        apart += float((value - lone_weights[key]).double().square().sum())
        moved += float((lone_weights[key] - start[key]).double().square().sum())
    assert apart**0.5 < DRIFT[plan] * moved**0.5, case


def test_two_processes_train_what_one_trains(two: World, tmp_path: Path) -> None:
    _compare(two, tmp_path, TWO)


def test_four_processes_train_what_one_trains(four: World, tmp_path: Path) -> None:
    _compare(four, tmp_path, FOUR)


def test_what_cannot_be_is_refused_on_every_rank(two: World, tmp_path: Path) -> None:
    two.run(_faults, tmp_path)


def test_a_rank_alone_with_an_infinity_makes_all_skip(two: World) -> None:
    two.run(_infinite_piece)


def test_statistics_of_a_pipeline_are_those_of_its_microbatches(two: World, tmp_path: Path) -> None:
    two.run(_statistics, tmp_path)


# --- started as users do ------------------------------------------------------------------------------------------

JOB = """
import os
from dataclasses import replace
from castwise.lab.workloads.workload import find_workload

plain = find_workload("gpt?layers=2&width=16&context=8&batch=4")
calls = []


def loss(model, batch):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 3:
        raise OSError("no more tokens")
    return plain.loss(model, batch)


broken = replace(plain, loss=loss)
"""


def _ranks(folder: Path, *words: str) -> list[Forked]:
    (folder / "job.py").write_text(JOB)
    return command(folder, 2, "train", *words, "--device", "cpu")


def test_one_of_two_processes_speaks(tmp_path: Path) -> None:
    ranks = _ranks(tmp_path, "job.py:plain", "--layout", "pp2", "--schedule", "gpipe", "--microbatches", "2", "--steps", "4")  # fmt: skip
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].said("err")
    assert "gpt under bf16-mixed on pp2: loss" in ranks[0].said("out").replace("\n", " ")
    assert ranks[0].said("out").count("Wrote\n") == 1
    assert ranks[0].said("err").count("4/4") == 1
    assert ranks[1].said("out") == ""
    assert "4/4" not in ranks[1].said("err")
    record = json.loads((tmp_path / "runs" / "train-gpt" / "result.json").read_text())
    assert (record["status"], record["layout"], record["world_size"]) == ("ok", "pp2", 2)
    assert all((tmp_path / "runs" / "train-gpt" / name).exists() for name in record["files"])


def test_a_rank_that_fails_ends_all_with_one_sentence(tmp_path: Path) -> None:
    """Each rank ends by itself, also those that did not fail."""
    ranks = _ranks(tmp_path, "job.py:broken", "--out", "o", "--steps", "100000")
    assert [rank.code for rank in ranks] == [1, 1]
    said = "rank 1: workload 'gpt': loss(model, batch) failed: OSError: no more tokens (job.py, line 13, in loss)"
    lines = [
        line for rank in ranks for line in rank.said("err").splitlines() if line.startswith("castwise: ")
    ]
    assert lines == [f"castwise: {said}"]
    record = json.loads((tmp_path / "o" / "result.json").read_text())
    assert (record["status"], record["reason"], record["layout"]) == ("failed", said, "dp2")
