"""``train``: its files, its output, and its state after errors."""

from __future__ import annotations

import itertools
import json
import math
import queue
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.soak import every
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from castwise.commands.jobs import Event
from castwise.commands.jobs.train import TrainEvent, train
from castwise.errors import CastwiseError, DeviceError, NonFiniteError, PatternError, PlanError, WorkloadError
from castwise.lab.workloads.workload import Workload, find_workload


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def _events(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def _by_hand(workload: Workload, steps: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    model = workload.model().train()
    optimizer = workload.optimizer(model.parameters())
    torch.manual_seed(seed)
    losses = []
    for batch in itertools.islice(workload.batches(seed), steps):
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_fp32_is_the_plain_loop(tiny: str, tmp_path: Path) -> None:
    workload = find_workload(f"{tiny}:mlp")
    train(workload, "fp32", steps=20, out=tmp_path, seed=3)
    assert [line["loss"] for line in _lines(tmp_path)] == _by_hand(workload, 20, 3)


@every(2)
@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master"])
def test_it_learns_and_writes_everything_down(tiny: str, tmp_path: Path, plan: str) -> None:
    result = train(f"{tiny}:mlp", plan, steps=40, out=tmp_path)
    lines = _lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 41))
    losses = [line["loss"] for line in lines]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert result.status == "ok"
    assert result.final_loss == losses[-1]
    assert (result.steps, result.steps_done) == (40, 40)
    assert result.steps_per_s == pytest.approx(40 / result.time_s)
    assert 0 < result.metrics["error"] < losses[0]
    scaled = plan.startswith("fp16")
    assert all((line["loss_scale"] is not None) == scaled for line in lines)
    record = _result(tmp_path)
    assert record["plan"] == plan
    assert record["metrics"] == result.metrics
    assert record["environment"]["torch"] == torch.__version__
    assert {*record["files"]} == {"metrics.jsonl", "tensorboard", "model.pt", "curves.png"}
    assert all((tmp_path / name).exists() for name in record["files"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [step for step, _ in _events(tmp_path, "loss")] == list(range(1, 41))
    assert [value for _, value in _events(tmp_path, "loss")] == pytest.approx(losses)


def test_the_weights_are_fp32_and_those_that_were_trained(tiny: str, tmp_path: Path) -> None:
    workload = find_workload(f"{tiny}:mlp")
    result = train(workload, "bf16-mixed", steps=10, out=tmp_path)
    model = workload.model()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert workload.evaluate is not None
        assert workload.evaluate(model.eval())["error"] == pytest.approx(result.metrics["error"], rel=0.02)


def test_the_same_seed_gives_the_same_run_and_random_numbers_outside_stay(tiny: str, tmp_path: Path) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    train(f"{tiny}:mlp", "bf16-mixed", steps=5, out=tmp_path / "a", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    train(f"{tiny}:mlp", "bf16-mixed", steps=5, out=tmp_path / "b", seed=1)
    train(f"{tiny}:mlp", "bf16-mixed", steps=5, out=tmp_path / "c", seed=2)
    a, b, c = ([line["loss"] for line in _lines(tmp_path / name)] for name in "abc")
    assert a == b
    assert a != c


def test_progress_tells_loss_scale_skips_and_speed(tiny: str, tmp_path: Path) -> None:
    events: list[Event] = []
    plan = "fp16-mixed+loss_scale.init=1e30"  # overflows until the scale has fallen
    result = train(f"{tiny}:mlp", plan, steps=80, out=tmp_path, progress=events.append)
    steps = [event for event in events if isinstance(event, TrainEvent)]
    assert steps[0].done == 1
    last = steps[-1]
    assert (last.done, last.total) == (80, 80)
    assert last.loss == result.final_loss
    assert last.steps_per_s > 0
    assert last.skipped_steps == result.skipped_steps > 0
    lines = _lines(tmp_path)
    assert sum(line["skipped"] for line in lines) == result.skipped_steps
    for before, after in itertools.pairwise(lines):  # each line has the scale used in its step
        if before["skipped"]:
            assert after["loss_scale"] == before["loss_scale"] / 2
    assert [value for _, value in _events(tmp_path, "loss_scale")] == pytest.approx([
        line["loss_scale"] for line in lines
    ])
    assert (events[-1].stage, events[-1].done) == ("evaluating", 1)


def test_a_second_training_replaces_the_first(tiny: str, tmp_path: Path) -> None:
    train(f"{tiny}:mlp", "fp32", steps=6, out=tmp_path)
    train(f"{tiny}:mlp", "fp32", steps=4, out=tmp_path, seed=1)
    assert len(_lines(tmp_path)) == 4
    assert [step for step, _ in _events(tmp_path, "loss")] == [1, 2, 3, 4]


# --- errors ---------------------------------------------------------------------------------------------------


class _BlowsUp(nn.Linear):
    """A linear layer that returns NaN from its sixth call on."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs) * (math.nan if self.calls > 5 else 1.0)


def test_a_loss_that_becomes_nan_ends_it_and_nothing_written_is_lost(tiny: str, tmp_path: Path) -> None:
    workload = replace(find_workload(f"{tiny}:mlp"), model=lambda: _BlowsUp(8, 1))
    with pytest.raises(
        NonFiniteError, match=r"step 6 is nan under the plan bf16-mixed, although the data is finite"
    ):
        train(workload, "bf16-mixed", steps=500, out=tmp_path)
    lines = _lines(tmp_path)
    assert [line["loss"] is None for line in lines[:7]] == [False] * 5 + [True] * (len(lines[:7]) - 5)
    assert 6 <= len(lines) < 40
    record = _result(tmp_path)
    assert record["status"] == "failed"
    assert "step 6 is nan" in record["reason"]
    assert record["steps_done"] == len(lines)
    assert (tmp_path / "curves.png").exists()
    assert not (tmp_path / "model.pt").exists()
    assert [step for step, _ in _events(tmp_path, "loss")][:6] == [1, 2, 3, 4, 5, 6]


def test_a_loss_scale_skips_what_it_can_cure(tiny: str, tmp_path: Path) -> None:
    class Once(_BlowsUp):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            out = super().forward(inputs)
            self.calls = -1000 if self.calls > 5 else self.calls
            return out

    workload = replace(find_workload(f"{tiny}:mlp"), model=lambda: Once(8, 1))
    result = train(workload, "fp16-mixed+loss_scale.init=1024", steps=12, out=tmp_path)
    lines = _lines(tmp_path)
    assert [line["step"] for line in lines if line["skipped"]] == [6]
    assert lines[5]["loss"] is None
    assert result.skipped_steps == 1
    assert result.restored_buffers == {}
    assert result.status == "ok"


def test_buffers_that_a_skipped_step_had_poisoned_are_in_the_result(tiny: str, tmp_path: Path) -> None:
    class Normed(_BlowsUp):
        def __init__(self) -> None:
            super().__init__(8, 1)
            self.norm = nn.BatchNorm1d(1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            out = self.norm(super().forward(inputs))
            self.calls = -1000 if self.calls > 5 else self.calls
            return out  # type: ignore[no-any-return]

    workload = replace(find_workload(f"{tiny}:mlp"), model=Normed)
    result = train(workload, "fp16-mixed+loss_scale.init=1024", steps=12, out=tmp_path)
    assert result.skipped_steps == 1
    assert result.restored_buffers == {"norm.running_mean": 1, "norm.running_var": 1}
    assert "restored after skipped steps: norm.running_mean, norm.running_var" in result.summary()


@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed"])
def test_nan_in_the_data_is_named_under_every_plan(tiny: str, tmp_path: Path, plan: str) -> None:
    with pytest.raises(
        NonFiniteError, match=r"step 1 is nan: its data .* in batch\[0\] \(256 of 256 values\)"
    ):
        train(f"{tiny}:nan_data", plan, steps=5, out=tmp_path)


def test_nan_in_a_later_batch_is_named_too(tiny: str, tmp_path: Path) -> None:
    workload = find_workload(f"{tiny}:mlp")

    def batches(seed: int) -> Iterator[Any]:
        for number, (inputs, targets) in enumerate(workload.batches(seed), 1):
            yield inputs, targets.where(torch.tensor(number != 4, device=targets.device), math.inf)

    with pytest.raises(NonFiniteError, match=r"step 4 is inf: its data .* in batch\[1\] \(32 of 32 values\)"):
        train(replace(workload, batches=batches), "bf16-mixed", steps=50, out=tmp_path)


@pytest.mark.parametrize(
    ("name", "plan", "kind", "words"),
    [
        ("not_scalar", "fp32", WorkloadError, r"shape \[32, 1\].*\.mean\(\)"),
        ("three", "fp32", WorkloadError, r"batches\(seed\) ended after 3 batches"),
        ("breaks_in_low", "bf16-mixed", WorkloadError, r"failed: FloatingPointError: a kernel that cannot"),
        ("mlp", "bf16-mixed+regions.nowhere=fp32", PatternError, "nowhere"),
        ("mlp", "bf17", PlanError, "bf16"),
    ],
)
def test_other_faults_are_sentences(
    tiny: str, tmp_path: Path, name: str, plan: str, kind: type[CastwiseError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        train(f"{tiny}:{name}", plan, steps=9, out=tmp_path)
    assert "\n" not in str(caught.value)


def test_what_cannot_start_writes_nothing(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="steps=0"):
        train(f"{tiny}:mlp", "fp32", steps=0, out=tmp_path / "x")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no cuda device"):
            train(f"{tiny}:mlp", "fp32", steps=1, out=tmp_path / "x", device="cuda")
    assert not (tmp_path / "x").exists()


def test_an_interruption_keeps_the_record(tiny: str, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event.done >= 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        train(f"{tiny}:mlp", "bf16-mixed", steps=50, out=tmp_path, progress=stop)
    assert any(str(tmp_path) in note for note in caught.value.__notes__)
    assert _result(tmp_path)["status"] == "interrupted"
    assert len(_lines(tmp_path)) >= 1


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def ends(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """Yield a signal that raises KeyboardInterrupt, even if the test suite was started with the signal ignored."""
    former = signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, former)


@pytest.mark.parametrize("place", ["_put", "add_scalar", "close"])
def test_ctrl_c_waits_while_what_was_done_is_written_down(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, ends: signal.Signals
) -> None:
    """An interrupt inside TensorBoard's queue can leave its lock held, or its reader asleep for two minutes."""
    owner = queue.Queue if place == "_put" else SummaryWriter
    real = getattr(owner, place)
    came: list[str] = []
    calls = itertools.count()

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls) == (place == "_put"):  # the first item is queued before any step
            came.append(place)
            signal.raise_signal(ends)
            came.append("went on")
        return real(*args, **options)

    monkeypatch.setattr(owner, place, interrupted)
    before = signal.getsignal(ends)
    with pytest.raises(KeyboardInterrupt):
        train(f"{tiny}:mlp", "bf16-mixed", steps=9, out=tmp_path)
    assert came == [place, "went on"]
    assert signal.getsignal(ends) is before
    record = _result(tmp_path)
    assert record["status"] == "interrupted"
    assert record["steps_done"] == len(_lines(tmp_path)) >= 1


def test_outside_the_main_thread_interrupts_are_left_alone(tiny: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train, f"{tiny}:mlp", "fp32", steps=2, out=tmp_path).result().status == "ok"


def test_a_failed_training_takes_its_plan_off_again(tiny: str, tmp_path: Path) -> None:
    made: list[nn.Module] = []
    workload = find_workload(f"{tiny}:not_scalar")

    def model() -> nn.Module:
        made.append(workload.model())
        return made[-1]

    with pytest.raises(WorkloadError):
        train(replace(workload, model=model), "bf16-mixed", steps=2, out=tmp_path)
    assert made[0](torch.ones(1, 8)).dtype is torch.float32
    assert not made[0]._forward_pre_hooks


@pytest.mark.gpu
def test_a_gpu_trains_too(tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    result = train(f"{tiny}:mlp", "fp16-mixed", steps=60, out=tmp_path, device="cuda")
    lines = _lines(tmp_path)
    assert len(lines) == 60
    assert sum(line["loss"] for line in lines[-5:]) < 0.8 * sum(line["loss"] for line in lines[:5])
    assert result.environment.device_type == "cuda"
