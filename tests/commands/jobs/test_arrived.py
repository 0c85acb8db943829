"""Jobs on models given in bf16: an fp32 reference for plans, and a row for the model as given."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.here import DEVICE
from tests.searches import short_finals
from tests.soak import each_value, every
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise import Workload
from castwise.commands.jobs.train import train
from castwise.core.model.arrival import as_given, widen_for
from castwise.core.plans.plan import PRESETS, Plan
from castwise.lab.parity.probes import REFERENCE


@pytest.fixture(autouse=True, scope="module")
def one_start() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        short_finals(patch)
        yield


class Tokens(nn.Module):
    """A small token model; with ``adapters``, all but an adapter is frozen."""

    def __init__(self, adapters: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.out = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 20)
        self.bfloat16()
        self.adapter = None
        if adapters:
            self.requires_grad_(False)
            self.adapter = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        if self.adapter is not None:
            hidden = hidden + self.adapter(hidden.to(self.adapter.weight.dtype)).to(hidden.dtype)
        out: Tensor = self.out(self.norm(hidden))
        return out


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch).float().flatten(0, 1), (batch * 7 % 20).flatten())


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield torch.randint(20, (8, 4), generator=generator)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in params if p.requires_grad], lr=1e-4)


def workload(adapters: bool) -> Workload:
    return Workload("tokens", lambda: Tokens(adapters), adamw, batches, loss)


@each_value()
@pytest.mark.parametrize(
    ("adapters", "goal"), [(False, "time"), (True, "time"), (True, "memory"), (False, "numerics")]
)
def test_a_search_takes_it_and_shows_it_as_given(adapters: bool, goal: str) -> None:
    model = Tokens(adapters)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = castwise.tune(
        model=model, loss=loss, batches=batches, optimizer=adamw, goal=goal, formats=("bf16",) if goal == "numerics" else ("fp32", "bf16"),
        memory=False, budget_s=15, device=DEVICE, fresh=True,
    )  # fmt: skip
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype is before[name].dtype
    said = " ".join(result.evidence.notes)
    assert "were given in bfloat16. The fp32 plan widens them" in said
    provenance = result.plan.provenance
    assert provenance is not None
    assert provenance["widen"] == widen_for(result.plan, model)
    rows = {row.name: row for row in result.evidence.candidates}
    if goal == "numerics":
        assert "as given" not in rows
    else:
        row = rows["as given"]
        assert row.plan == ("fp32+output=as_is" if adapters else "bf16-true+output=as_is") != str(result.plan)
        assert row.parity is not None
        assert row.parity.value > 0.0
        if row.rounds:  # without rounds it was too slow to time
            assert row.speedup is not None
        if not adapters:
            assert "of the optimizer's update of" in row.reason
            assert row.status == "rejected"
    updates = adamw(model.parameters())
    with castwise.Amp(result.plan, device=DEVICE) as amp:
        amp.prepare(model, updates, widen=provenance["widen"])
        amp.backward(loss(model, next(batches(0))))
        amp.step(updates)


@every(2, 1)
@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-true"])
def test_parity_is_that_of_the_float_model(plan: str) -> None:
    model = Tokens(adapters=False)
    low, wide = (
        castwise.parity(one, loss, batches, plan, optimizer=adamw)
        for one in (model, copy.deepcopy(model).float())
    )
    assert low.verdict == wide.verdict
    assert low.damage == wide.damage
    assert low.lost_updates == wide.lost_updates
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_base_that_stays_low_is_part_of_what_parity_judges() -> None:
    """The reference is entirely in fp32, and dither does not move a frozen base stored in bf16."""
    model = Tokens(adapters=True)
    found = castwise.parity(model, loss, batches, "fp32+output=as_is", optimizer=adamw)
    assert found.damage.value > 0.0
    assert found.verdict == "pass"
    assert castwise.parity(model, loss, batches, "fp32", optimizer=adamw).damage.value == 0.0


@pytest.mark.parametrize("adapters", [False, True], ids=["all", "adapters"])
def test_a_bench_trains_it_under_every_plan(adapters: bool) -> None:
    """Training starts from the given weights, and fp32 trains like the model converted with ``float()``."""
    plans = ["fp32", "bf16-mixed", "bf16-master", "bf16-true"]
    ours = workload(adapters)
    wide = Workload("tokens", lambda: Tokens(adapters).float(), adamw, batches, loss)
    low, floats = (
        castwise.bench(
            one, plans, device=DEVICE, hopeless=float("inf"), steps=3, rounds=1, starts=0, memory=False
        )
        for one in (ours, wide)
    )
    for plan, row, other in zip(plans, low.plans, floats.plans, strict=True):
        assert row.status == "ok"
        if not adapters or plan == "fp32" or PRESETS[plan].stores_low:
            assert row.losses == other.losses, plan


@every(2, 1)
@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-master", "bf16-true"])
def test_a_training_takes_it_and_saves_fp32(plan: str, tmp_path: Path) -> None:
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"loss": float(loss(model, next(batches(9))))}

    made = Workload("tokens", lambda: Tokens(adapters=False), adamw, batches, loss, evaluate=evaluate)
    wide = Workload("tokens", lambda: Tokens(adapters=False).float(), adamw, batches, loss, evaluate=evaluate)
    low = train(made, plan, steps=3, out=tmp_path / "low")
    floats = train(wide, plan, steps=3, out=tmp_path / "wide")
    assert low.final_loss == floats.final_loss
    assert low.metrics == floats.metrics
    saved, other = (torch.load(tmp_path / one / "model.pt") for one in ("low", "wide"))
    assert all(torch.equal(value, other[name]) for name, value in saved.items())
    assert {value.dtype for value in saved.values()} == {torch.float32}


def test_what_a_plan_widens_where_it_is_tried() -> None:
    model = Tokens(adapters=True)
    assert widen_for(REFERENCE, model) == widen_for(PRESETS["tf32"], model) == "all"
    assert widen_for(PRESETS["bf16-mixed"], model) is True
    assert widen_for(PRESETS["fp16-mixed"], model) == "all"
    assert widen_for(PRESETS["fp16-mixed"], Tokens(adapters=False)) is True
    assert widen_for(PRESETS["bf16-master"], model) is False
    assert as_given(Tokens(adapters=False)) == Plan.parse("bf16-true+output=as_is")
    assert as_given(Tokens(adapters=False).half()) == Plan.parse("fp16-true+output=as_is")
    assert as_given(Tokens(adapters=True)) == Plan.parse("fp32+output=as_is")
    assert as_given(Tokens(adapters=False).float()) is None
    mixed = Tokens(adapters=False)
    mixed.norm.float()
    assert as_given(mixed) is None
