"""``train`` on several real processes trains what it trains on one."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from castwise.jobs.train import train
from castwise.session import Amp
from castwise.workload import find_workload

from ..processes import leave

GPT = "gpt?layers=4&width=32&heads=2&context=16&batch=8"
STEPS = 6
TOLERANCE = {"fp32": 1e-6, "bf16-mixed": 2e-4, "fp16-mixed": 3e-5, "bf16-master": 2e-4}
"""Relative, of losses: sums over processes are taken in another order, and low formats round them."""
DRIFT = {"fp32": 1e-4, "bf16-mixed": 0.1, "fp16-mixed": 0.05, "bf16-master": 0.1}
"""Of weights, as a share of the way that training moved them: AdamW moves a weight whose gradient is all rounding
(the bias of the keys) as far as any other."""

CASES: list[dict[str, Any]] = [
    {"layout": layout, "plan": plan}
    for layout in ("dp2", "fsdp2", "tp2", "pp2")
    for plan in ("fp32", "bf16-mixed", "fp16-mixed")
    if hasattr(Amp, "pipeline") or (layout, plan) != ("pp2", "fp16-mixed")
] + [
    {"layout": None, "plan": "fp32"},
    {"layout": "fsdp2", "plan": "bf16-master"},
    {"layout": "pp2", "plan": "fp32", "schedule": "gpipe", "microbatches": 1},
    {"layout": "pp2", "plan": "fp32", "schedule": "interleaved"},
    {"layout": "pp2", "plan": "fp32+regions.blocks.0=fp32"},
]
FOUR: list[dict[str, Any]] = [
    {"layout": "dp2xtp2", "plan": "fp16-mixed"},
    {"layout": "fsdp2xtp2", "plan": "fp16-mixed"},
    {"layout": "dp2xfsdp2", "plan": "bf16-mixed"},
    {"layout": "dp2xpp2", "plan": "fp32"},
    {"layout": "tp2xpp2", "plan": "fp32"},
]


def _name(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def worker(rank: int, folder: str, world: int, cases: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    for case in cases:
        train(GPT, steps=STEPS, out=Path(folder, _name(case)), device="cpu", seed=3, **case)
    leave()


def _compare(folder: Path, world: int, cases: list[dict[str, Any]]) -> None:
    mp.spawn(worker, (str(folder), world, cases), world)
    alone: dict[str, Any] = {}
    for case in cases:
        plan = case["plan"]
        if plan not in alone:
            train(GPT, plan, steps=STEPS, out=folder / plan, device="cpu", seed=3)
            alone[plan] = folder / plan
        _same(folder / _name(case), alone[plan], world, case)


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
    start = find_workload(GPT).model().state_dict()
    apart = moved = 0.0
    for key, value in weights.items():
        assert type(value) is torch.Tensor
        assert value.dtype is torch.float32
        assert value.shape == start[key].shape
        apart += float((value - lone_weights[key]).double().square().sum())
        moved += float((lone_weights[key] - start[key]).double().square().sum())
    assert apart**0.5 < DRIFT[plan] * moved**0.5, case


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Keep torch from spinning on cores that other tests use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_two_processes_train_what_one_trains() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _compare(Path(folder), 2, CASES)


def test_four_processes_train_what_one_trains() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _compare(Path(folder), 4, FOUR)
