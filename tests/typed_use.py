"""A user's program as a type checker sees it. It is not run: ``make lint`` checks it, ``make package`` against the
wheel.

It uses every public name. Each line marked ``type: ignore`` must be an error: mypy --strict warns if it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, assert_type

import torch
from torch import Tensor, nn

import castwise

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A user's module: ``prepare`` returns the same type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per row of ``[batch, 8]``."""
        return torch.tanh(self.layer(inputs))


def plans(folder: Path) -> None:
    """Use plans and their parts."""
    plan = castwise.Plan(
        compute="fp16",
        regions=(castwise.Region("*.norm", compute="fp32"),),
        loss_scale=castwise.LossScale(init=1024.0),
    )
    assert_type(plan, castwise.Plan)
    assert_type(castwise.Plan.preset("bf16-mixed"), castwise.Plan)
    assert_type(castwise.Plan.parse("bf16-mixed+ops.exp=fp32"), castwise.Plan)
    assert_type(castwise.Plan.load(folder / "plan.json"), castwise.Plan)
    assert_type(plan.regions, tuple[castwise.Region, ...])
    assert_type(plan.loss_scale, castwise.LossScale | None)
    assert_type(plan.digest, str)
    assert_type(plan.compute_dtype, torch.dtype)
    assert_type(plan.save(folder / "plan.json"), None)
    castwise.Plan("bf16")  # type: ignore[call-arg]
    castwise.Plan(computes="bf16")  # type: ignore[call-arg]
    plan.compute = "fp32"  # type: ignore[misc]


def numerics(folder: Path, batch: Batch) -> None:
    """Use the tools that inspect a model."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    found = castwise.first_nonfinite(Net(), loss, batch, "fp16-mixed", loss_scale=1024.0)
    assert_type(found, castwise.FirstNonfinite)
    assert_type(found.cure, castwise.Plan | None)
    assert_type(found.save(folder), Path)
    table = castwise.operator_table(Net(), loss, batch)
    assert_type(table, castwise.OperatorTable)
    assert_type(table.cast_bytes, int)


def served(batches: Iterable[Batch]) -> None:
    """Test the outputs of a model that is served."""
    found = castwise.output_parity(Net(), "bf16-mixed", list(batches), call=lambda net, batch: net(batch[0]))
    assert_type(found, castwise.OutputParity)
    assert_type(found.needed, int | None)
    assert_type(found.outputs[0].rank, float | None)


def train(batches: Iterable[Batch]) -> None:
    """Run the README's loop, with a specific optimizer type."""
    with castwise.Amp("bf16-mixed", device="cpu") as amp:
        assert_type(amp, castwise.Amp)
        model, optimizer = amp.prepare(Net(), torch.optim.AdamW(nn.Linear(8, 1).parameters()))
        assert_type(model, Net)
        assert_type(optimizer, torch.optim.AdamW)
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(model(inputs), targets)
            assert_type(amp.backward(loss), None)
            result = amp.step(optimizer, max_norm=1.0)
            assert_type(result, castwise.StepResult)
            assert_type(result.skipped, bool)
            assert_type(amp.scale(loss), Tensor)
        assert_type(amp.plan, castwise.Plan)
    alone = castwise.Amp(castwise.Plan.preset("fp16-mixed")).prepare(Net())
    assert_type(alone, Net)
    two = castwise.Amp(torch.bfloat16).prepare(Net(), torch.optim.SGD([]), torch.optim.AdamW([]))
    assert_type(two, tuple[Any, ...])
    amp.prepare(Net(), method=["generate"])  # type: ignore[call-overload]
    castwise.Amp(1.0)  # type: ignore[arg-type]
    amp.backward("loss")  # type: ignore[arg-type]


def by_torchs_names(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    """Use castwise's supersets of torch.amp in place of torch.amp."""
    scaler: torch.amp.GradScaler = castwise.GradScaler("cpu", hysteresis=2)
    with castwise.autocast("bf16-mixed", device_type="cpu"):
        loss = model(inputs).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)

    @castwise.autocast(torch.bfloat16, device_type="cpu")
    def run(rows: Tensor, times: int) -> list[Tensor]:
        return [rows] * times

    assert_type(run(inputs, 2), list[Tensor])
    run(inputs, "2")  # type: ignore[arg-type]

    @castwise.fp32_function
    def widened(rows: Tensor) -> Tensor:
        return rows.exp()

    assert_type(widened(inputs), Tensor)
    assert_type(castwise.lower_function(widened)(inputs), Tensor)
    assert_type(castwise.widest_function(widened)(inputs), Tensor)
    assert_type(castwise.AveragedModel(Net()).update_parameters(Net()), None)


class Doubled(torch.autograd.Function):
    """An autograd function that follows castwise.autocast."""

    @staticmethod
    @castwise.custom_fwd
    def forward(ctx: torch.autograd.function.FunctionCtx, rows: Tensor) -> Tensor:
        """Return the rows doubled."""
        return 2 * rows

    @staticmethod
    @castwise.custom_bwd
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        """Return the gradient."""
        return 2 * grad


def make_batches(seed: int) -> Iterator[Batch]:
    """Yield one batch."""
    yield torch.randn(4, 8), torch.randn(4, 1)


def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def look(folder: Path) -> None:
    """Compare two plans."""
    found = castwise.compare(
        Net(), compute_loss, (torch.zeros(2, 8), torch.zeros(2, 1)), "fp32", "bf16-mixed"
    )
    assert_type(found, castwise.Comparison)
    assert_type([call.path for call in found.birthplaces], list[str])
    assert_type(found.gradient_error, float | None)
    assert_type(found.save(folder), Path)
    served = castwise.mismatch(
        Net(), [torch.zeros(2, 8, dtype=torch.long)], "bf16-mixed", ["bf16-true"], tokens="sampled"
    )
    assert_type(served, castwise.Mismatch)
    assert_type([row.k3 for row in served.serve], list[float])
    castwise.mismatch(Net(), [], "fp32", "fp32", tokens="drawn")  # type: ignore[arg-type]


def experiments(folder: Path) -> None:
    """Use the tools that measure."""
    workload = castwise.Workload(
        name="mine", model=Net, optimizer=lambda params: torch.optim.SGD(params, 0.1), batches=make_batches,
        loss=compute_loss,
    )  # fmt: skip
    found = castwise.tune(workload, budget_s=60.0)
    assert_type(found, castwise.TuneResult)
    assert_type(found.plan, castwise.Plan)
    assert_type(found.answer, str)
    assert_type(found.save(folder), tuple[Path, ...])
    assert_type(
        castwise.tune(model=Net(), loss=compute_loss, batches=[1], optimizer=torch.optim.Adam),
        castwise.TuneResult,
    )
    judged = castwise.parity(Net(), compute_loss, list(make_batches(0)), "bf16-mixed")
    assert_type(judged, castwise.ParityResult)
    assert_type(judged.verdict, Literal["pass", "fail", "undecided"])
    forecast = castwise.forecast(
        Net(), compute_loss, list(make_batches(0)), ("fp16",), optimizer=torch.optim.Adam
    )
    assert_type(forecast, castwise.Forecast)
    assert_type(forecast.save(folder), Path)
    assert_type(
        castwise.bench("sine", ["fp32", castwise.Plan.preset("bf16-mixed")]).save(folder), tuple[Path, ...]
    )
    castwise.tune(workload, budget="long")  # type: ignore[call-arg]
    try:
        castwise.autocats  # type: ignore[attr-defined]  # noqa: B018
    except castwise.CastwiseError as error:
        assert_type(error, castwise.CastwiseError)


def gone_wrong(folder: Path) -> None:
    """Record a failed step, and roll back."""
    model, amp = Net(), castwise.Amp("fp16-mixed")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with castwise.Recorder(amp, model, folder) as recorder:
        assert_type(recorder.write("an alarm"), None)
        assert_type(recorder.records, tuple[Path, ...])
    assert_type(castwise.first_nonfinite(model, compute_loss, 1), castwise.FirstNonfinite)
    again = castwise.replay(folder, model, compute_loss, plan="fp32")
    assert_type(again, castwise.Replay)
    assert_type(again.exact, bool | None)
    recovery = castwise.Recovery(amp, model, optimizer, compute_loss, folder, every=10)
    assert_type(recovery.returns[0].cause, str)
    assert_type(amp.change("bf16-mixed"), None)
    with castwise.Monitor(amp, every=16) as monitor:
        assert_type(monitor.save(folder), Path)


def serve(model: torch.nn.Module, inputs: torch.Tensor) -> torch.nn.Module:
    program: torch.export.ExportedProgram = castwise.export(
        model, "bf16-mixed", (inputs,), dynamic_shapes=None
    )
    program.module()(inputs)
    return castwise.bake(model, torch.bfloat16)
