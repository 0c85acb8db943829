"""Jobs that cannot run raise an error of one sentence, with the line of the user's code, and change nothing."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.here import DEVICE
from tests.soak import some
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise import Workload
from castwise.commands.jobs.doctor import doctor
from castwise.commands.jobs.train import train
from castwise.errors import CastwiseError, DeviceError, WorkloadError

Batch = tuple[Tensor, Tensor]
Call = Callable[[Workload, Path], Any]


def batches(seed: int) -> Iterator[Batch]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        x = torch.randn(16, 8, generator=generator)
        yield x, x.sum(1, keepdim=True)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def lbfgs(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))


class Empty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y @ y  # shapes do not match


def raises(model: nn.Module, batch: Batch) -> Tensor:
    model(batch[0])
    raise KeyError("target")


def leaves(model: nn.Module, batch: Batch) -> Tensor:
    sys.exit("done")


def raises_elsewhere(model: nn.Module, batch: Batch) -> Tensor:
    if str(os.getpid()) != os.environ["CASTWISE_TEST_CALLER"]:
        raise KeyError("target")
    return loss(model, batch)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return cast("nn.Module", torch.jit.script(network()))


def goes_backward(model: nn.Module, batch: Batch) -> Tensor:
    found = loss(model, batch)
    found.backward()
    return found


def goes_backward_and_detaches(model: nn.Module, batch: Batch) -> Tensor:
    return goes_backward(model, batch).detach()


def no_data(seed: int) -> Iterator[Batch]:
    raise OSError("the disk is gone")
    yield


def no_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    raise ValueError("no such schedule")


def parity(job: Workload, optimizer: bool = True) -> Any:
    torch.manual_seed(0)
    return castwise.parity(
        job.model(), job.loss, job.batches, "bf16-mixed", optimizer=job.optimizer if optimizer else None
    )


CALLS: dict[str, Call] = {
    "tune": lambda job, folder: castwise.tune(job, out=folder, device=DEVICE, budget_s=10, memory=False),
    "bench": lambda job, _: castwise.bench(
        job, device=DEVICE, steps=4, rounds=1, inference=False, memory=False
    ),
    "train": lambda job, folder: train(job, "bf16-mixed", steps=2, out=folder, device=DEVICE),
    "doctor": lambda job, _: doctor(job, device=DEVICE, small=True),
    "parity": lambda job, _: parity(job),
}
TIMES = ("tune", "bench", "train", "doctor")
"""The calls that train."""
JOBS: dict[str, tuple[Workload, str, tuple[str, ...]]] = {
    "a loss that raises": (
        Workload("job", network, sgd, batches, raises),
        "KeyError: 'target' (test_bad_input.py, line {raises:2}, in raises)", tuple(CALLS),
    ),
    "a loss that leaves": (
        Workload("job", network, sgd, batches, leaves),
        "SystemExit: done (test_bad_input.py, line {leaves:1}, in leaves)", tuple(CALLS),
    ),
    "a scripted model": (
        Workload("job", scripted, sgd, batches, loss), "a scripted or traced model", TIMES,
    ),
    "a model that raises": (
        Workload("job", Broken, sgd, batches, loss),
        "mat1 and mat2 shapes cannot be multiplied (16x1 and 16x1) (test_bad_input.py, line {Broken.forward:2}, in forward)",
        tuple(CALLS),
    ),
    "batches that raise": (
        Workload("job", network, sgd, no_data, loss),
        "OSError: the disk is gone (test_bad_input.py, line {no_data:1}, in no_data)", tuple(CALLS),
    ),
    "an optimizer that raises": (
        Workload("job", network, no_optimizer, batches, loss),
        "ValueError: no such schedule (test_bad_input.py, line {no_optimizer:1}, in no_optimizer)", tuple(CALLS),
    ),
    "a loss that calls backward": (
        Workload("job", network, sgd, batches, goes_backward), "loss(model, batch) calls backward itself; return the loss",
        tuple(CALLS),
    ),
    "a loss that calls backward and detaches": (
        Workload("job", network, sgd, batches, goes_backward_and_detaches), "loss(model, batch) calls backward itself",
        tuple(CALLS),
    ),
    "a model without parameters": (
        Workload("job", Empty, sgd, batches, loss), "no parameter of ", tuple(CALLS),
    ),
    "an optimizer that needs a closure": (
        Workload("job", network, lbfgs, batches, loss), "LBFGS.step() needs a closure", TIMES,
    ),
}  # fmt: skip


def expected(text: str) -> str:
    """Return the text with ``{function:n}`` replaced by the line number n lines below the function's first line."""
    for word in (part.split("}")[0] for part in text.split("{")[1:]):
        name, offset = word.split(":")
        found: Any = Broken.forward if "." in name else globals()[name]
        text = text.replace(f"{{{word}}}", str(found.__code__.co_firstlineno + int(offset)))
    return text


@pytest.mark.parametrize(
    ("job", "call"), [(job, call) for job, (_, _, calls) in JOBS.items() for call in calls]
)
def test_one_sentence_says_what_is_wrong_and_where(job: str, call: str, tmp_path: Path) -> None:
    workload, text, _ = JOBS[job]
    with pytest.raises(WorkloadError) as caught:
        CALLS[call](workload, tmp_path)
    said = str(caught.value)
    assert expected(text) in said
    assert "\n" not in said
    assert said.startswith(("workload 'job'", "tune('job')", "parity:"))


@pytest.mark.parametrize("call", some(["tune", "doctor", "bench"], 2))
def test_what_fails_in_a_process_that_castwise_started_is_said_with_its_place(
    call: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTWISE_TEST_CALLER", str(os.getpid()))
    job = Workload("job", network, sgd, batches, raises_elsewhere)
    text = expected("KeyError: 'target' (test_bad_input.py, line {raises_elsewhere:2}, in raises_elsewhere)")
    if call == "bench":  # bench trains in this process and measures memory in another
        found = castwise.bench(job, device=DEVICE, steps=4, rounds=1, inference=False)
        assert [row.notes for row in found.plans] == [(f"memory was not measured: {text}",)] * 2
        return
    if call == "doctor":  # doctor then times the job in this process
        request.getfixturevalue("rates_are_known")
        CALLS[call](job, tmp_path)
        return
    notes = castwise.tune(job, device=DEVICE, budget_s=5, memory=False).evidence.notes
    assert any(
        text in note and note.startswith("The finalists were timed once, in one process") for note in notes
    )


def test_parity_asks_nothing_of_an_optimizer_that_needs_a_closure() -> None:
    assert parity(JOBS["an optimizer that needs a closure"][0]).verdict == "pass"


@pytest.mark.parametrize("job", JOBS)
def test_a_model_given_as_an_object_is_as_it_was(job: str) -> None:
    workload, _, _ = JOBS[job]
    model = workload.model().eval()
    before = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state()
    with pytest.raises(CastwiseError):
        castwise.tune(
            model=model, loss=workload.loss, batches=workload.batches, optimizer=workload.optimizer, budget_s=10,
            memory=False,
        )  # fmt: skip
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training or module._forward_hooks for module in model.modules())
    assert castwise.Amp.of(model) is None
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("call", ["tune", "bench", "train", "doctor", "parity"])
@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("xpu", "no xpu device is available; use device='cpu'"),
        ("gpu", "torch knows no such device here; allowed: cpu"),
    ],
)
def test_a_device_that_is_not_there(call: str, device: str, text: str, tmp_path: Path) -> None:
    if device == "xpu" and torch.xpu.is_available():
        pytest.skip("this machine has such a device")
    job = Workload("job", network, sgd, batches, loss)
    calls: dict[str, Call] = {
        "tune": lambda job, _: castwise.tune(job, device=device),
        "bench": lambda job, _: castwise.bench(job, device=device),
        "train": lambda job, folder: train(job, "fp32", steps=2, out=folder, device=device),
        "doctor": lambda job, _: doctor(job, device=device),
        "parity": lambda job, _: castwise.parity(
            network(), job.loss, job.batches, "bf16-mixed", device=device
        ),
    }
    with pytest.raises(DeviceError) as caught:
        calls[call](job, tmp_path)
    assert str(caught.value).startswith(f"{call}(device='{device}'): ")
    assert text in str(caught.value)
