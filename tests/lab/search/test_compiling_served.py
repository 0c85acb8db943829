"""Compiling plans for inference on trial: what is compared, and what a trial refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise import Plan, Workload
from castwise.lab.search import compile_trial
from castwise.lab.search.compile_trial import CompileTrial, try_served
from castwise.lab.workloads.workload import no_loss, no_optimizer
from tests.here import DEVICE

pytestmark = [
    pytest.mark.skipif(DEVICE == "sim", reason="the simulated device has no compiler"),
    pytest.mark.skipif(
        not hasattr(torch.compiler, "set_default_backend"), reason="this torch can compile with Inductor only"
    ),
]
PLANS = ("fp32", "bf16-mixed", "bf16-true", "bf16-true+memory_format=channels_last")


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile with ``aot_eager``, which takes a tenth of a second; Inductor takes many seconds."""
    monkeypatch.setattr(compile_trial, "BLOCK_S", 0.01)
    limit = torch._dynamo.config.fail_on_recompile_limit_hit
    torch.compiler.set_default_backend("aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.config.fail_on_recompile_limit_hit = limit
    torch.compiler.set_default_backend(None)
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        return self.end(self.b(self.a(x).relu()))

    def end(self, y: Tensor) -> Any:
        return y


class Scaled(Net):
    """Compiled, its outputs are wrong by 5 %."""

    def end(self, y: Tensor) -> Any:
        return y * 1.05 if torch.compiler.is_compiling() else y


class Swapped(Net):
    """Compiled, it returns two logits of some rows in the wrong order."""

    def end(self, y: Tensor) -> Any:
        return torch.where(y[:, :1] > 0, y.flip(1), y) if torch.compiler.is_compiling() else y


class LessOfIt(Net):
    """Compiled, one of its outputs is missing."""

    def end(self, y: Tensor) -> Any:
        return {"y": y} if torch.compiler.is_compiling() else {"y": y, "mean": y.mean(1, keepdim=True)}


class Nan(Net):
    def end(self, y: Tensor) -> Any:
        return torch.where(y > 0.4, float("nan"), y) if torch.compiler.is_compiling() else y


class Restless(Net):
    """It is compiled anew at every call."""

    def end(self, y: Tensor) -> Any:
        self.calls += 1
        return y + 0.0 * self.calls


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(64, 8, generator=generator)


def uneven(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for size in (64, 48, 80, 64, 33, 50, 64, 64, 71, 20) * 3:
        yield torch.randn(size, 8, generator=generator)


def tried(model: Callable[[], nn.Module], plan: str, data: Any = batches) -> CompileTrial:
    job = Workload("served", model, no_optimizer, data, no_loss)
    return try_served(job, Plan.parse(f"{plan}+compile=default"), torch.device(DEVICE), 0)


@pytest.mark.parametrize("data", [batches, uneven])
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_whose_compiled_outputs_are_as_good_can_be_compiled(plan: str, data: Any) -> None:
    found = tried(Net, plan, data)
    assert found.reason == ""
    assert min(found.compile_s, found.eager_s, found.step_s) > 0.0


@pytest.mark.parametrize("model", [Scaled, Swapped, LessOfIt, Nan])
@pytest.mark.parametrize("plan", PLANS[:3])
def test_outputs_that_compiling_changes_are_seen(model: type[Net], plan: str) -> None:
    assert tried(model, plan).reason.startswith("not compiled: ")


def test_a_model_that_is_compiled_anew_at_every_call_is_not_compiled() -> None:
    assert tried(Restless, "bf16-true").reason.startswith("not compiled: it recompiles ")


def test_what_the_compiler_refuses_is_the_reason() -> None:
    def refuses(_graph: Any, _inputs: Any) -> None:
        raise RuntimeError("no kernel of that kind")

    torch.compiler.set_default_backend(refuses)
    found = tried(Net, "bf16-true")
    assert found.reason.startswith("does not compile: ")
    assert "no kernel of that kind" in found.reason


def test_a_model_of_which_nothing_is_compiled_is_not_called_compiled() -> None:
    with torch.compiler.set_stance("force_eager"):
        assert tried(Net, "bf16-true").reason == compile_trial.NOTHING
