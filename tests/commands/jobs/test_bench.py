"""The bench from end to end on a small MLP, and rows of plans that fail, are stopped or are too slow."""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.here import DEVICE

from castwise import Plan, Region
from castwise.commands.jobs import Event
from castwise.commands.jobs.bench import BenchResult, bench
from castwise.errors import NonFiniteError, PlanError, UnknownNameError, WorkloadError
from castwise.lab.timing.stats import Ratio
from castwise.lab.workloads.workload import Workload, find_workload

LOW = torch.bfloat16
NEVER = 1e6
"""A limit so high that no plan is stopped as too slow; on a busy machine, steps of microseconds could be."""


@pytest.fixture(scope="module")
def told() -> list[Event]:
    """Return the list for the progress events of ``result``."""
    return []


def _unsendable(spec: str) -> Workload:
    """Return a workload that cannot be sent to another process, so memory is measured in forks, which start quickly."""
    workload = find_workload(spec)
    return replace(workload, loss=lambda model, batch: workload.loss(model, batch))


@pytest.fixture(scope="module")
def result(told: list[Event]) -> BenchResult:
    workload = _unsendable(str(Path(__file__).with_name("tiny_workloads.py")) + ":mlp")
    return bench(
        workload, ["bf16-mixed", "bf16-true"], device=DEVICE, hopeless=NEVER, steps=23, rounds=6, starts=3, seed=3,
        progress=told.append,
    )  # fmt: skip


def _row(result: BenchResult, name: str):  # type: ignore[no-untyped-def]
    return next(row for row in result.plans if row.name == name)


def test_fp32_is_added_first_and_every_row_is_complete(result: BenchResult) -> None:
    assert [row.name for row in result.plans] == ["fp32", "bf16-mixed", "bf16-true"]
    for row in result.plans:
        assert (row.status, row.reason, row.notes) == ("ok", "", ())
        assert row.training is not None
        assert row.inference is not None
        assert row.training.step.n == row.inference.step.n == 6
        assert (row.training.speedup is None) == (row.name == "fp32")
        assert row.memory is not None
        assert row.memory.training_peak_bytes > row.memory.inference_peak_bytes > 0
        assert len(row.losses) == 23
        assert row.final_loss == row.losses[-1]
        assert row.final_loss_difference == row.losses[-1] - result.plans[0].losses[-1]
        assert Plan.parse(row.plan).digest == row.digest
        assert row.metrics["error"] > 0


def test_plans_start_alike_see_the_same_and_learn(result: BenchResult) -> None:
    fp32, mixed, _ = (row.losses for row in result.plans)
    # bf16 has 8 bits, and dropout masks and batches are the same, so losses agree within a few times 2**-8
    # (on CUDA dropout masks depend on the format).
    assert mixed == pytest.approx(fp32, rel=1.0 if DEVICE == "cuda" else 0.05)
    assert mixed != fp32
    assert fp32[-1] < 0.8 * fp32[0]


def test_losses_are_those_of_a_loop_written_by_hand(result: BenchResult, tiny: str) -> None:
    workload = find_workload(f"{tiny}:plain")
    torch.manual_seed(5)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    batches, losses = workload.batches(5), []
    for _ in range(9):
        loss = workload.loss(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    again = bench(
        workload,
        ["fp32"],
        device=DEVICE,
        hopeless=NEVER,
        starts=0,
        steps=9,
        rounds=3,
        seed=5,
        inference=False,
        memory=False,
    )
    assert list(again.plans[0].losses) == losses


def test_bf16_keeps_half_as_many_activations(result: BenchResult) -> None:
    fp32, _, true = (row.memory.saved_bytes for row in result.plans)
    assert true < 0.75 * fp32


def test_pictures_are_thinned_and_named_by_plan(result: BenchResult) -> None:
    assert list(result.images) == ["target", "fp32", "bf16-mixed", "bf16-true"]
    assert {(len(picture), len(picture[0])) for picture in result.images.values()} == {(100, 3)}


def test_same_seed_same_record_but_for_the_times(result: BenchResult, tiny: str) -> None:
    again = bench(
        f"{tiny}:mlp", ["bf16-mixed", "bf16-true"], device=DEVICE, hopeless=NEVER, steps=23, rounds=6, starts=0, seed=3,
        inference=False, memory=False,
    )  # fmt: skip
    for one, other in zip(result.plans, again.plans, strict=True):
        assert one.losses == other.losses
        assert one.metrics == other.metrics


def test_memory_is_measured_in_a_process_of_its_own(result: BenchResult, tiny: str) -> None:
    """The memory is the same as in a fork."""
    alone = bench(f"{tiny}:mlp", ["fp32"], device=DEVICE, hopeless=NEVER, steps=3, rounds=1, starts=0, seed=3)
    assert alone.plans[0].memory is not None
    assert alone.plans[0].memory == replace(result.plans[0].memory, method=alone.plans[0].memory.method)


def test_saves_a_page_the_record_and_pictures(result: BenchResult, tmp_path: Path) -> None:
    paths = result.save(tmp_path / "new" / "folder")
    assert [path.name for path in paths] == [
        "bench.html",
        "bench.json",
        "time.png",
        "memory.png",
        "loss.png",
        "prediction.png",
    ]
    record = json.loads(paths[1].read_text())
    assert record == json.loads(result.to_json())
    assert record["environment"]["device_type"] == DEVICE
    assert result.headline() in paths[0].read_text().replace("&#39;", "'").replace("\xa0", " ")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[2:])


def test_table_fits_a_terminal(result: BenchResult) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result.table())
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("bf16-mixed" in line for line in lines) >= 3
    console.file.close()


def test_events_lead_to_the_end_of_every_stage(result: BenchResult, told: list[Event]) -> None:
    for stage in ("training", "timing", "inference", "memory"):
        for row in result.plans:
            mine = [event for event in told if (event.stage, event.subject) == (stage, row.name)]
            assert [event.done for event in mine] == sorted(event.done for event in mine)
            assert mine[-1].done == mine[-1].total


# --- times in separate processes ----------------------------------------------------------------------------


def test_every_plan_is_started_again_to_be_timed(result: BenchResult) -> None:
    assert (result.starts, result.rounds, result.notes) == (3, 6, ())
    for row in result.plans:
        for timing in (row.training, row.inference):
            assert [len(start) for start in timing.starts_s] == [2, 2, 2]
            assert row.name == "fp32" or timing.speedup.n == 3


def test_no_more_batches_are_taken_in_a_start_than_steps_were_asked_for(tiny: str) -> None:
    result = bench(
        f"{tiny}:three",
        ["bf16-mixed"],
        device=DEVICE,
        hopeless=NEVER,
        steps=3,
        rounds=2,
        starts=2,
        memory=False,
    )
    assert (result.starts, result.notes) == (2, ())


@pytest.mark.parametrize("why", ["it holds a lock", "it fails there", "it is told not to"])
def test_what_cannot_run_elsewhere_is_timed_here_and_that_is_said(tiny: str, why: str) -> None:
    workload, here, lock = find_workload(f"{tiny}:plain"), os.getpid(), threading.Lock()

    def holding(model: torch.nn.Module, batch: object) -> torch.Tensor:
        with lock:
            return workload.loss(model, batch)

    def failing(model: torch.nn.Module, batch: object) -> torch.Tensor:
        if os.getpid() != here:
            raise FileNotFoundError("data.bin")
        return workload.loss(model, batch)

    losses = {"it holds a lock": holding, "it fails there": failing, "it is told not to": workload.loss}
    result = bench(
        replace(workload, loss=losses[why]), ["bf16-mixed"], device=DEVICE, hopeless=NEVER, steps=9, rounds=6,
        starts=0 if why == "it is told not to" else 2, memory=False,
    )  # fmt: skip
    assert (result.starts, result.rounds) == (0, 6)
    assert result.plans[1].training.speedup.n == result.plans[1].inference.speedup.n == 6
    said = {"it holds a lock": "cannot be sent", "it fails there": "data.bin"}
    assert [said[why] in note for note in result.notes] == [True] * (why in said)


def test_a_plan_that_fails_in_its_own_process_alone_says_so(tiny: str) -> None:
    workload, here = find_workload(f"{tiny}:plain"), os.getpid()

    def loss(model: torch.nn.Module, batch: object) -> torch.Tensor:
        if os.getpid() != here and next(model.parameters()).dtype is torch.bfloat16:
            raise RuntimeError("no kernel for bf16")
        return workload.loss(model, batch)

    result = bench(
        replace(workload, loss=loss), ["bf16-mixed", "bf16-true"], device=DEVICE, hopeless=NEVER, steps=9, rounds=4, starts=2,
        memory=False,
    )  # fmt: skip
    row = _row(result, "bf16-true")
    assert (row.status, row.training) == ("failed", None)
    assert "no kernel for bf16" in row.reason
    assert _row(result, "bf16-mixed").training.speedup.n == 2


# --- rows without numbers -----------------------------------------------------------------------------------


def test_a_hopeless_plan_is_stopped_and_says_by_how_much(tiny: str) -> None:
    result = bench(
        f"{tiny}:slow_in_low",
        ["bf16-mixed", "bf16-true"],
        device=DEVICE,
        starts=0,
        steps=62,
        rounds=6,
        memory=False,
    )
    row = _row(result, "bf16-mixed")
    assert row.status == "stopped"
    assert 2 <= len(row.losses) < 62
    factor = int(row.reason.removeprefix("stopped: ").removesuffix("x slower than fp32"))
    assert factor >= 10
    assert row.training is row.inference is row.final_loss is None
    assert _row(result, "bf16-true").status == "ok"
    assert len(_row(result, "bf16-true").losses) == 62
    assert f"bf16-mixed was {row.reason}." in _text(result)


def test_a_plan_the_device_cannot_run_is_a_row_with_the_reason(tiny: str) -> None:
    if DEVICE == "cuda":
        names, lack = [replace(Plan.preset("fp32"), fp32_conv="bf16")], "is for CPUs"
    else:
        names, lack = ["tf32", replace(Plan.preset("fp32"), fp32_conv="tf32")], "no TF32"
    result = bench(
        f"{tiny}:mlp",
        [*names, "bf16-mixed"],
        device=DEVICE,
        hopeless=NEVER,
        starts=0,
        steps=9,
        rounds=3,
        memory=False,
    )
    for row in result.plans[1:-1]:
        assert row.status == "unsupported"
        assert lack in row.reason
        assert row.reason in _text(result)
    assert result.plans[-1].status == "ok"


def test_a_region_that_matches_nothing_is_a_row_with_the_reason(tiny: str) -> None:
    plan = replace(Plan.preset("bf16-mixed"), regions=(Region("nowhere.*", compute="fp32"),))
    result = bench(
        f"{tiny}:mlp", [plan], device=DEVICE, hopeless=NEVER, starts=0, steps=9, rounds=3, memory=False
    )
    assert result.plans[1].status == "unsupported"
    assert "nowhere.*" in result.plans[1].reason


def test_an_exception_in_one_plan_does_not_lose_the_others(tiny: str) -> None:
    result = bench(
        f"{tiny}:breaks_in_low",
        ["bf16-mixed", "bf16-true"],
        device=DEVICE,
        hopeless=NEVER,
        starts=0,
        steps=20,
        rounds=6,
        memory=False,
    )
    row = _row(result, "bf16-mixed")
    assert (row.status, row.reason) == (
        "failed",
        "FloatingPointError: a kernel (tiny_workloads.py, line 70, in forward)",
    )
    assert len(row.losses) == 2
    assert _row(result, "bf16-true").status == "ok"
    assert _row(result, "fp32").status == "ok"


def test_process_is_left_as_it_was(tiny: str) -> None:
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    before = torch.backends.mkldnn.matmul.fp32_precision
    bench(
        f"{tiny}:breaks_in_low",
        ["bf16-mixed", "bf16-true"],
        device=DEVICE,
        hopeless=NEVER,
        starts=0,
        steps=9,
        rounds=3,
        memory=False,
    )
    assert torch.rand(1) == expected
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert not torch.is_autocast_enabled(DEVICE)


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "error", "message"),
    [
        (
            "not_scalar",
            WorkloadError,
            r"returned a tensor of shape \[32, 1\] and float32; it must return a floating tensor with one element",
        ),
        ("nan_data", NonFiniteError, "the loss of the first step is nan in fp32"),
        ("three", WorkloadError, r"batches\(seed\) ended after 3 batches"),
    ],
)
def test_a_broken_workload_is_one_clear_sentence(
    tiny: str, attribute: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        bench(
            f"{tiny}:{attribute}",
            ["bf16-mixed"],
            device=DEVICE,
            hopeless=NEVER,
            starts=0,
            steps=12,
            rounds=2,
            memory=False,
        )


def test_bad_numbers_and_plans_are_refused_before_any_work(tiny: str) -> None:
    with pytest.raises(PlanError, match=r"bench\(steps=2, .*needs steps >= 3"):
        bench(f"{tiny}:mlp", steps=2)
    with pytest.raises(PlanError, match=r"bench\(.*starts=-1, .*starts >= 0"):
        bench(f"{tiny}:mlp", starts=-1)
    with pytest.raises(UnknownNameError, match="bf16-mixed"):
        bench(f"{tiny}:mlp", ["bf16-mixd"])


def test_the_baseline_is_fp32_by_name_wherever_it_stands(tiny: str) -> None:
    plans = ["O0", Plan.preset("bf16-mixed"), "fp32", torch.float16, "O0"]
    result = bench(
        f"{tiny}:mlp",
        plans,
        device=DEVICE,
        hopeless=NEVER,
        starts=0,
        steps=4,
        rounds=1,
        inference=False,
        memory=False,
    )
    assert [row.name for row in result.plans] == ["fp32", "O0", "bf16-mixed", "fp16-mixed"]
    assert result.plans[1].losses == result.plans[0].losses  # O0 is fp32 by another name


def test_short_runs_have_fewer_rounds(tiny: str) -> None:
    result = bench(
        f"{tiny}:mlp",
        ["bf16-mixed"],
        device=DEVICE,
        hopeless=NEVER,
        starts=0,
        steps=5,
        rounds=12,
        inference=False,
        memory=False,
    )
    assert result.rounds == 3
    assert result.plans[1].training.step.n == 3
    assert (result.plans[1].training.speedup.n, result.plans[1].training.speedup.level) == (3, 0.95)
    assert all(map(math.isfinite, result.plans[1].losses))


def _text(result: BenchResult) -> str:
    """Return the table as text, on lines so wide that no sentence is wrapped."""
    with open("/dev/null", "w") as nowhere:
        console = Console(width=400, record=True, file=nowhere)
        console.print(result.table())
        return console.export_text()


# --- without training ---------------------------------------------------------------------------------------


def served_only(**changes: object) -> Workload:
    """Return a workload without optimizer and loss."""
    job = find_workload(str(Path(__file__).with_name("tiny_workloads.py")) + ":mlp")
    return Workload(
        "served", job.model, batches=job.batches, outputs=lambda model, batch: model(batch[0]), **changes
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("starts", [0, 2])
def test_a_workload_without_an_optimizer_is_measured_in_inference(starts: int) -> None:
    job = served_only(evaluate=lambda model: {"in training mode": float(model.training)})
    found = bench(
        job, ["bf16-mixed", "bf16-true"], device=DEVICE, hopeless=NEVER, steps=12, rounds=4, starts=starts
    )
    assert not found.trains
    assert [row.status for row in found.plans] == ["ok"] * 3
    assert all(row.training is None and not row.losses and row.final_loss is None for row in found.plans)
    assert all(row.inference is not None and row.inference.step.n == 4 for row in found.plans)
    assert all(
        row.memory is not None and row.memory.training_peak_bytes is None and row.memory.inference_peak_bytes
        for row in found.plans
    )
    assert all(row.metrics == {"in training mode": 0.0} for row in found.plans)
    assert "has no optimizer and no loss, so only inference was measured" in found.notes[0]
    assert " runs served " in found.headline()
    assert "outputs were not compared" in found.headline()
    assert "loss" not in found.headline()


def test_the_answer_is_about_inference_if_nothing_was_trained() -> None:
    found = bench(served_only(), device=DEVICE, hopeless=NEVER, steps=12, rounds=4, starts=0, memory=False)
    base, row = found.plans
    ratio, starts = Ratio(2.0, 1.9, 2.1, 0.95, 6), ((1e-4,) * 6,)
    assert row.inference is not None
    fast = replace(row, inference=replace(row.inference, speedup=ratio, starts_s=starts))
    assert replace(found, plans=(base, fast)).best == "bf16-mixed"
    assert replace(found, plans=(base, fast), trains=True).best is None


def test_a_plan_that_cannot_serve_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    job = served_only()
    found = bench(
        replace(job, evaluate=lambda model: {"sum": float(next(model.parameters()).dtype is LOW) / 0.0}
                if next(model.parameters()).dtype is LOW else {}),
        ["bf16-true"], device=DEVICE, hopeless=NEVER, steps=12, rounds=4, starts=0, memory=False,
    )  # fmt: skip
    assert [row.status for row in found.plans] == ["ok", "failed"]
    assert "ZeroDivisionError" in found.plans[1].reason


def test_training_that_is_asked_for_needs_an_optimizer_and_something_must_be_measured() -> None:
    with pytest.raises(WorkloadError, match=r"no optimizer.*training=False.*pass optimizer="):
        bench(served_only(), device=DEVICE, training=True)
    with pytest.raises(PlanError, match=r"no optimizer and no loss, so only inference"):
        bench(served_only(), device=DEVICE, inference=False)
    with pytest.raises(PlanError, match=r"nothing is left to measure"):
        bench(served_only(), device=DEVICE, training=False, inference=False)
    both = find_workload(str(Path(__file__).with_name("tiny_workloads.py")) + ":mlp")
    found = bench(both, device=DEVICE, training=False, steps=12, rounds=4, starts=0, memory=False)
    assert not found.trains
    assert found.notes == ()
