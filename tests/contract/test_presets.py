"""One suite of promises over all presets and model kinds."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.core.casting import frames
from castwise.core.plans.plan import PRESETS
from castwise.errors import DeviceError
from tests.contract.models import CASES, Case
from tests.here import DEVICE
from tests.soak import each_value, every, pairs

pytestmark = [
    # Inductor uses torch.jit, and Dynamo reads .grad of the input of a resumed frame; both warn.
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
NAMES = [name for name in PRESETS if name not in ("tf32", "O0", "O3")]
"""The test CPUs have no TF32; O0 and O3 are other names of fp32 and fp16-true, as ``test_modules`` shows."""

# Largest relative difference of a loss between eager and compiled: a few rounding errors of the compute format.
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 4e-3}


def start(case: Case, name: str) -> tuple[castwise.Amp, nn.Module, torch.optim.Optimizer]:
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), case.rate, momentum=0.9)
    amp = castwise.Amp(name, device=DEVICE)
    amp.prepare(model, optimizer)
    return amp, model, optimizer


def train(
    amp: castwise.Amp, model: nn.Module, optimizer: Any, case: Case, steps: int, run: Any = None
) -> list[float]:
    losses = []
    batch = case.batch()
    for _ in range(steps):
        loss = case.loss(model if run is None else run, batch)
        amp.backward(loss)
        amp.step(optimizer, max_norm=5.0)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@each_value()
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name: str, case: Case) -> None:
    amp, model, optimizer = start(case, name)
    losses = train(amp, model, optimizer, case, 20)
    assert losses[-1] < 0.5 * losses[0]
    stored = {p.dtype for p in model.parameters()}
    low = castwise.Plan.preset(name).compute_dtype
    assert (low in stored) == (castwise.Plan.preset(name).params == "compute" or low is torch.float32)
    amp.close()


@each_value()
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_continue_bit_for_bit(name: str, case: Case) -> None:
    amp, model, optimizer = start(case, name)
    train(amp, model, optimizer, case, 3)
    file = io.BytesIO()
    torch.save(
        {"model": amp.model_state_dict(model), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()},
        file,
    )
    want = train(amp, model, optimizer, case, 3)
    weights = amp.model_state_dict(model)
    amp.close()

    amp, model, optimizer = start(case, name)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(v.dtype is torch.float32 for v in state["model"].values() if v.is_floating_point())
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    assert train(amp, model, optimizer, case, 3) == want
    for key, value in amp.model_state_dict(model).items():
        assert torch.equal(value, weights[key]), key
    amp.close()


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_and_state_are_restored_after_exceptions(name: str) -> None:
    case = CASES["mlp"]
    amp, model, _ = start(case, name)
    before = torch.is_autocast_enabled(DEVICE), torch.get_default_dtype()
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 3))
    assert (torch.is_autocast_enabled(DEVICE), torch.get_default_dtype()) == before
    assert frames.depth() == 0
    x, _ = case.batch()
    assert model(x).dtype is torch.float32
    amp.close()
    assert not model._forward_hooks


@every(2, 1)
@pytest.mark.parametrize(("name", "kind"), pairs(NAMES, CASES))
def test_compiled_equals_eager(name: str, kind: str) -> None:
    """The losses over several steps agree within the rounding of the compute format."""
    case = CASES[kind]
    amp, model, optimizer = start(case, name)
    eager = train(amp, model, optimizer, case, 3)
    amp.close()
    torch._dynamo.reset()
    amp, model, optimizer = start(case, name)
    compiled = train(amp, model, optimizer, case, 3, run=torch.compile(model, backend="aot_eager"))
    amp.close()
    assert compiled == pytest.approx(eager, rel=TOLERANCE[castwise.Plan.preset(name).compute])


def test_a_checkpoint_of_any_plan_loads_into_any_other() -> None:
    case = CASES["gpt"]
    weights = {}
    for name in NAMES:
        amp, model, optimizer = start(case, name)
        train(amp, model, optimizer, case, 2)
        weights[name] = amp.model_state_dict(model)
        amp.close()
    for name in NAMES:
        amp, model, _ = start(case, name)
        for state in weights.values():
            model.load_state_dict(state)
            out = amp.model_state_dict(model)
            exact = name not in ("bf16-true", "fp16-true")
            for key, value in state.items():
                if exact:
                    assert torch.equal(out[key], value), (name, key)
                else:  # stored low without masters: rounded once, at most half a bf16 ulp
                    torch.testing.assert_close(out[key], value, rtol=2**-8, atol=1e-6)
        amp.close()


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="this CPU session would be refused for another reason on CUDA"
)
def test_tf32_is_refused_where_there_is_none() -> None:
    with pytest.raises(DeviceError, match="no TF32"):
        castwise.Amp("tf32", device=DEVICE)
