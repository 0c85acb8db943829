"""A workload's steps under a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from castwise.core.plans.plan import Plan
from castwise.errors import DeviceError, WorkloadError
from castwise.lab.timing.runners import InferenceRun, TrainingRun, build_model
from castwise.lab.workloads.workload import Workload, find_workload

CPU = torch.device("cpu")
FP32, MIXED = Plan.preset("fp32"), Plan.preset("bf16-mixed")


@pytest.fixture
def mlp(tiny: str) -> Workload:
    return find_workload(f"{tiny}:mlp")


def _blocks(run: TrainingRun, *sizes: int) -> None:
    for size in sizes:
        run.before(size)
        run.run(size)
        run.after()


def test_losses_do_not_depend_on_blocks_or_on_what_runs_in_between(mlp: Workload) -> None:
    alone = TrainingRun(mlp, FP32, CPU, seed=4)
    _blocks(alone, 6)
    mine, other = TrainingRun(mlp, FP32, CPU, seed=4), TrainingRun(mlp, MIXED, CPU, seed=4)
    for size in (1, 2, 3):
        _blocks(mine, size)
        torch.rand(3)
        _blocks(other, size)
    assert mine.losses == alone.losses  # dropout draws included
    assert other.losses == pytest.approx(mine.losses, rel=0.05)
    another = TrainingRun(mlp, FP32, CPU, seed=5)
    _blocks(another, 6)
    assert another.losses != alone.losses


def test_given_weights_are_where_training_starts(mlp: Workload) -> None:
    first = TrainingRun(mlp, FP32, CPU, seed=1)
    start = first.weights()
    _blocks(first, 3)
    assert not torch.equal(start["0.weight"], first.weights()["0.weight"])
    second = TrainingRun(mlp, MIXED, CPU, seed=2, state=start)
    assert all(torch.equal(value, start[key]) for key, value in second.weights().items())


def test_process_wide_settings_hold_in_the_block_alone() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU cannot use bf16 inside fp32 matrix products")
    seen: list[str] = []

    class Looks(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append(torch.backends.mkldnn.matmul.fp32_precision)
            return super().forward(inputs)

    def batches(seed: int):  # type: ignore[no-untyped-def]
        while True:
            yield torch.ones(2, 2)

    workload = Workload(
        name="looks", model=lambda: Looks(2, 2), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batches=batches, loss=lambda model, batch: model(batch).sum(),
    )  # fmt: skip
    before = torch.backends.mkldnn.matmul.fp32_precision
    plain = TrainingRun(workload, FP32, CPU)
    inside = TrainingRun(workload, replace(FP32, fp32_matmul="bf16"), CPU)
    _blocks(inside, 1)
    _blocks(plain, 1)
    with inside.evaluating() as model:
        model(torch.ones(2, 2))
    assert seen == ["bf16", before, "bf16"]
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_inference_calls_the_model_as_the_loss_does_and_not_the_loss(mlp: Workload) -> None:
    calls: list[str] = []

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        calls.append("loss")
        return mlp.loss(model, batch)

    run = InferenceRun(replace(mlp, loss=loss), FP32, CPU)
    run.model.register_forward_hook(
        lambda module, args, out: calls.append(f"{list(args[0].shape)} {out.is_inference()}")
    )
    calls.clear()
    run.before(2)
    run.run(2)
    run.after()
    assert calls == ["[32, 8] True"] * 2
    assert not run.model.training


def test_inference_runs_the_whole_loss_where_that_calls_the_model_twice(mlp: Workload) -> None:
    calls: list[str] = []

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        calls.append("loss")
        return mlp.loss(model, batch) + mlp.loss(model, batch)

    run = InferenceRun(replace(mlp, loss=loss), FP32, CPU)
    calls.clear()
    run.before(1)
    run.run(1)
    run.after()
    assert calls == ["loss"]


def test_a_failed_block_leaves_the_process_as_it_was(tiny: str) -> None:
    run = TrainingRun(find_workload(f"{tiny}:not_scalar"), FP32, CPU)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    run.before(1)
    with pytest.raises(WorkloadError, match=r"shape \[32, 1\]"):
        run.run(1)
    run.after()
    assert torch.rand(1) == expected


def test_model_must_be_a_module(mlp: Workload) -> None:
    with pytest.raises(WorkloadError, match=r"model\(\) returned int, not a torch.nn.Module"):
        build_model(replace(mlp, model=lambda: 3), CPU, 0)  # type: ignore[arg-type,return-value]


def test_what_the_device_lacks_is_refused_though_it_is_set_by_hand(mlp: Workload) -> None:
    with pytest.raises(DeviceError, match="tf32"):
        TrainingRun(mlp, replace(FP32, fp32_conv="tf32"), CPU)
