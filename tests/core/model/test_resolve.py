"""Resolving a plan for a model: pure, complete and readable."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import castwise
from castwise import Plan, Region
from castwise.core.model.resolve import resolve
from castwise.core.plans.plan import PRESETS
from castwise.errors import PatternError
from tests.here import DEVICE
from tests.soak import every

NAMES = [name for name in PRESETS if name != "tf32"]
WITHOUT_AUTOCASTING = ["bf16-true", "fp16-true", "O2", "O3", "naive"]


class State(nn.Module):
    """Every kind of state that models keep in buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("ema", torch.ones(3))
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("positions", torch.arange(300.0).reshape(1, -1))
        self.register_buffer("usage", torch.zeros(2, 4))
        self.register_buffer("table", torch.linspace(0, 1, 8).reshape(1, 8))
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.ema.mul_(0.999).add_(0.001 * 2)
        return self.last(self.norm(self.first(x)) + self.table)


@every(3)
@pytest.mark.parametrize("name", NAMES)
def test_state_that_a_model_keeps_is_not_a_weight(name: str) -> None:
    model = State()
    before = {key: value.dtype for key, value in model.named_buffers()}
    with castwise.Amp(name, device=DEVICE) as amp:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        amp.prepare(model, optimizer)
        for _ in range(300):
            with torch.no_grad():
                model(torch.ones(2, 8))
        dtypes = {key: value.dtype for key, value in model.named_buffers()}
        narrowed = {key for key in dtypes if dtypes[key] is not before[key]}
        assert narrowed == ({"mask"} if name in WITHOUT_AUTOCASTING else set())
        assert float(model.steps) == 300.0  # bf16 stops at 256
        # An EMA in bf16 stays at 1.0, because a step of 0.001 is rounded away.
        torch.testing.assert_close(model.ema, torch.full((3,), 2 - 0.999**300), rtol=1e-4, atol=0)
        amp.backward(1e-3 * model(torch.randn(4, 8)).square().mean())
        assert not amp.step(optimizer).skipped
    assert {key: value.dtype for key, value in model.named_buffers()} == before


@pytest.mark.parametrize("name", NAMES)
def test_the_rotary_table_of_a_llama_keeps_its_digits(name: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    exact = model.model.rotary_emb.inv_freq.clone()
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        assert torch.equal(model.model.rotary_emb.inv_freq, exact)
        ids = torch.arange(12).reshape(1, -1)
        assert model(input_ids=ids, position_ids=ids + 4000, labels=ids).loss.isfinite()


def test_a_region_that_names_a_module_stores_its_buffers() -> None:
    plan = Plan(compute="bf16", params="compute", regions=(Region("norm", params="bf16"),))
    storage = resolve(plan, State()).storage
    assert storage["norm.running_mean"] is torch.bfloat16
    assert storage["norm.weight"] is torch.bfloat16
    assert "steps" not in storage


def test_a_batch_norm_keeps_its_weights_with_its_statistics() -> None:
    resolution = resolve(Plan.preset("bf16-true"), State())
    assert "norm.weight" not in resolution.storage
    assert resolution.storage["first.weight"] is torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_under_spectral_norm_trains(name: str) -> None:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(8, 8)), nn.utils.spectral_norm(nn.Linear(8, 4))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        amp.backward(1e-3 * model(torch.randn(4, 8)).square().mean())
        assert not amp.step(optimizer).skipped


@pytest.mark.parametrize("name", NAMES)
def test_resolving_changes_nothing(name: str) -> None:
    model = State()
    before = copy.deepcopy(model.state_dict())
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    resolution = resolve(Plan.preset(name), model)
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == attributes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert resolution == resolve(Plan.preset(name), model)
    assert set(resolution.kept) <= {name for name, _ in model.named_buffers()}


def test_it_prints_what_it_decided() -> None:
    amp = castwise.Amp("bf16-true+regions.norm=fp32", device=DEVICE)
    text = str(amp.resolve(State()))
    assert text.splitlines()[0] == "bf16-true+regions.norm=fp32 on State"
    assert "norm    fp32     fp32            in bf16" in text
    assert "tensors to be stored in another format: 5 in bfloat16" in text
    assert "buffers kept in their own format: steps, ema, inv_freq, positions, usage, table" in text
    assert "State   bf16     bf16            whole model, with its own operator rules" in text


def test_it_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import castwise.core.model.resolve

    calls = []
    real = castwise.core.model.resolve.assign
    monkeypatch.setattr(castwise.core.model.resolve, "assign", lambda *args: calls.append(1) or real(*args))
    castwise.Amp("bf16-master", device=DEVICE).prepare(State())
    assert len(calls) == 1


class Parts(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.timeout(15)
def test_many_regions_on_many_modules_take_seconds() -> None:
    model = Parts(nn.Sequential(*(nn.Identity() for _ in range(20))) for _ in range(300))
    regions = tuple(Region(f"**.{number % 20}", compute="fp32") for number in range(400))
    places = resolve(Plan(compute="bf16", regions=regions), model).places
    assert sum(place.compute == "fp32" for place in places.values()) == 6_000
    assert places["15.3"].compute == "fp32"


def test_a_pattern_that_matches_nothing_is_not_echoed_whole() -> None:
    with pytest.raises(PatternError, match=r"no module of State matches.* If State is one stage") as error:
        resolve(Plan(compute="bf16", regions=(Region("x" * 999, compute="fp32"),)), State())
    assert len(str(error.value)) < 900


def test_runs_of_stars_name_the_whole_model_too() -> None:
    places = resolve(Plan(compute="bf16", regions=(Region("****", compute="fp32"),)), State()).places
    assert {place.compute for place in places.values()} == {"fp32"}
