"""``Amp.change``: a running training continues under another plan, or unchanged if the change fails."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise import Amp
from castwise.core.masters import without_masters
from castwise.errors import CastwiseError
from tests.here import DEVICE
from tests.soak import some

PLANS = [
    "fp32",
    "bf16-mixed",
    "fp16-mixed",
    "bf16-master",
    "fp16-master",
    "bf16-mixed+regions.1=fp32+ops.gelu=fp32",
]


def begin(plan: str) -> tuple[Amp, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp = Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    return amp, model, optimizer


def train(
    amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0
) -> list[float]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(16, 8, generator=generator)).square().mean()
        amp.backward(loss)
        amp.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def kept(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return weights and optimizer state in full precision."""
    state: dict[str, Any] = without_masters(optimizer.state_dict())["state"]
    return [*amp.model_state_dict(model).values()] + [v for one in state.values() for v in one.values()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(("before", "after"), some(list(itertools.permutations(PLANS, 2)), 3))
def test_no_bit_of_weights_and_state_is_lost_and_training_goes_on_as_under_the_new_plan(
    before: str, after: str
) -> None:
    amp, model, optimizer = begin(before)
    train(amp, model, optimizer, 3)
    had = [tensor.clone() for tensor in kept(amp, model, optimizer)]
    amp.change(after)
    assert str(amp.plan) == str(Amp(after, device=DEVICE).plan)
    assert equal(kept(amp, model, optimizer), had)
    again, other, its = begin(after)
    with torch.no_grad():
        own = its.state_dict()
        own["state"] = copy.deepcopy(optimizer.state_dict()["state"])
    its.load_state_dict(own)
    other.load_state_dict(copy.deepcopy(amp.model_state_dict(model)))
    assert train(amp, model, optimizer, 3, seed=1) == train(again, other, its, 3, seed=1)
    assert amp.holds(optimizer)


@pytest.mark.parametrize("plan", PLANS)
def test_a_change_that_fails_leaves_the_training_as_it_was(plan: str) -> None:
    amp, model, optimizer = begin(plan)
    losses = train(amp, model, optimizer, 3)
    with pytest.raises(CastwiseError, match="nowhere"):
        amp.change("bf16-mixed+regions.nowhere=fp32")
    losses += train(amp, model, optimizer, 3, seed=1)
    undisturbed = begin(plan)
    assert losses == train(*undisturbed, 3) + train(*undisturbed, 3, seed=1)


def test_who_listens_goes_on_listening() -> None:
    amp, model, optimizer = begin("fp32")
    losses: list[float] = []
    skipped: list[bool] = []
    end = amp.listen(
        lambda loss, name: losses.append(loss.item()), lambda of, result: skipped.append(result.skipped)
    )
    trained = train(amp, model, optimizer, 2)
    amp.change("fp16-mixed")
    trained += train(amp, model, optimizer, 2)
    end()
    train(amp, model, optimizer, 1)
    assert losses == trained
    assert skipped == [False] * 4


def left_by(act: Any, times: int = 12) -> dict[str, int]:
    """Count what repeated calls leave alive: castwise objects by class, and finalizers."""

    def alive() -> Counter[str]:
        gc.collect()
        found = Counter(
            type(each).__qualname__
            for each in gc.get_objects()
            if str(type(each).__module__).startswith("castwise.")
        )
        found["finalizers"] = len(weakref.finalize._registry)  # type: ignore[attr-defined]
        return found

    for _ in range(3):  # creates objects that are made only once
        act()
    before = alive()
    for _ in range(times):
        act()
    return {name: more for name, more in (alive() - before).items() if more >= times // 2}


@pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op:FutureWarning")
def test_a_change_leaves_nothing_behind() -> None:
    amp, model, optimizer = begin("bf16-mixed")

    def change() -> None:
        for plan in (*PLANS, "O1"):
            amp.change(plan)
            train(amp, model, optimizer, 1)

    assert left_by(change) == {}


@pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op:FutureWarning")
@pytest.mark.parametrize("plan", ["bf16-mixed+ops.gelu=fp32", "O1", "O2", "bf16-master", "fp16-master"])
@pytest.mark.parametrize("kept", [False, True], ids=["a model of its own", "a model that stays"])
def test_a_closed_session_leaves_nothing_behind(plan: str, kept: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def live() -> None:
        mine = model if kept else copy.deepcopy(model)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
        with Amp(plan, device=DEVICE) as amp:
            amp.prepare(mine, optimizer)
            train(amp, mine, optimizer, 2)

    assert left_by(live) == {}
