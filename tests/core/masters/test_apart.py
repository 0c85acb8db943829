"""A broken model does not affect other models in the process."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from castwise import Amp, AveragedModel
from castwise.core.masters.sync import attachments
from castwise.errors import StateError
from tests.here import DEVICE


def prepared(seed: int = 0) -> tuple[Amp, nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    amp = Amp("bf16-master")
    amp.prepare(model, optimizer)
    return amp, model, optimizer


def train(amp: Amp, model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    for _ in range(steps):
        amp.backward(model(torch.randn(4, 8, generator=generator)).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()


def masters_of(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def look(model: nn.Module, amp: Amp) -> None:
    """Run everything that updates a model from its masters before reading it."""
    model(torch.ones(1, 8))
    model.state_dict()
    amp.model_state_dict(model)
    AveragedModel(model).update_parameters(model)


@pytest.mark.parametrize("copied", [False, True], ids=["the model", "a copy"])
def test_a_model_that_was_typed_anew_does_not_stop_another(copied: bool) -> None:
    """After ``model.float()``, that model's own steps raise an error; other models train and close."""
    broken, other = prepared(), prepared(1)
    train(*broken)
    _, model, optimizer = broken
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    model.float()
    with torch.no_grad():
        masters_of(optimizer)[0].mul_(1.0)
    look(other[1], other[0])
    train(*other)
    with pytest.raises(StateError, match=r"model\.float\(\)"):
        model(torch.ones(1, 8))
    broken[0].close()
    train(*other)
    other[0].close()
    assert {p.dtype for p in (*other[1].parameters(), *broken[1].parameters())} == {torch.float32}


def test_threads_train_models_of_their_own() -> None:
    """Each thread gets the same result as a model trained alone."""
    results: dict[int, Any] = {}

    def work(index: int) -> None:
        if DEVICE != "cpu":
            torch.set_default_device(DEVICE)  # the default device is set per thread
        try:
            amp, model, optimizer = lives[index]
            train(amp, model, optimizer, 20)
            amp.close()
            results[index] = [p.detach() for p in model.parameters()]
        except BaseException as error:
            results[index] = error

    lives = [prepared() for _ in range(4)]
    threads = [threading.Thread(target=work, args=(index,)) for index in range(1, 4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    work(0)
    for index in range(1, 4):
        assert isinstance(results[index], list), results[index]
        assert all(map(torch.equal, results[index], results[0]))


def test_what_leaves_while_another_thread_looks_at_all_leaves_quietly() -> None:
    first, second = prepared(), prepared()
    looking = attachments()
    next(looking)  # like a thread that is halfway through the iteration
    second[0].close()
    left = weakref.ref(second[1])
    del second
    gc.collect()  # an error in a callback here fails this test
    assert left() is None
    assert first[0].plan.keeps_masters
    del looking


def test_a_parameter_put_in_anothers_place_is_trained_by_a_master() -> None:
    """A parameter is replaced in model and optimizer after ``prepare``; the group's length does not change."""
    amp, model, optimizer = prepared()
    model[2].weight = new = nn.Parameter(torch.ones_like(model[2].weight))
    optimizer.param_groups[0]["params"][2] = new
    train(amp, model, optimizer)
    assert masters_of(optimizer)[2].stored is new
    amp.close()
    assert masters_of(optimizer)[2] is new
    assert new.dtype is torch.float32


def test_a_session_keeps_no_masters_of_models_that_are_gone() -> None:
    """The masters are freed with the model, while the session lives on."""
    amp, model, optimizer = prepared()
    train(amp, model, optimizer)
    master = weakref.ref(masters_of(optimizer)[0])
    del model, optimizer
    gc.collect()
    assert master() is None
    amp.close()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_script_modules_take_no_hooks_and_are_passed_over() -> None:
    """A scripted module gets no hooks, but its parameters get masters."""
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Amp("bf16-master") as amp:
        amp.prepare(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("plan", ["fp32", "bf16-master", "fp16-master+optimizer=fused", "bf16-true"])
def test_a_group_may_hold_a_tuple(plan: str) -> None:
    """Torch's optimizers accept a tuple of parameters. It trains the same as a list, and the group keeps its type."""
    results = []
    for kind in (list, tuple):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer.param_groups[0]["params"] = kind(model.parameters())
        with Amp(plan, device=DEVICE) as amp:
            amp.prepare(model, optimizer)
            train(amp, model, optimizer)
            model[2].requires_grad_(False)
            train(amp, model, optimizer, 1)
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.add_param_group({"params": (nn.Parameter(torch.ones(1)),)})
            train(amp, model, optimizer)
        assert type(optimizer.param_groups[0]["params"]) is kind
        assert all(
            p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
        )
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))
