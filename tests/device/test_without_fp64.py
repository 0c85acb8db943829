"""On a device without float64, castwise computes nothing in float64."""

from __future__ import annotations

import pytest
import torch

import castwise
from castwise.errors import DeviceError
from tests.device import sim
from tests.device.test_finds import NAMES, net, step
from tests.here import DEVICE

pytestmark = pytest.mark.skipif(
    DEVICE != sim.NAME or sim.HAS_FP64, reason="needs the simulated device and CASTWISE_SIM_FP64=0"
)


def test_the_device_has_none() -> None:
    with pytest.raises(TypeError, match="no float64"):
        torch.ones(3).double()


@pytest.mark.parametrize("maker", ["fused", "plain"])
@pytest.mark.parametrize("plan", NAMES)
def test_every_preset_trains(plan: str, maker: str) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4, fused=maker == "fused")
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        for _ in range(5):  # plans without masters measure some of the steps
            step(amp, model, optimizer)
        amp.load_state_dict(amp.state_dict())
        step(amp, model, optimizer)


def test_a_plan_that_names_it_is_refused() -> None:
    plan = castwise.Plan(compute="bf16", regions=(castwise.Region("0", compute="fp64"),))
    with pytest.raises(
        DeviceError, match=r"sim \(simulated accelerator\) does not compute in fp64; use fp32 instead"
    ):
        castwise.Amp(plan, device=DEVICE)


def test_experiments_sum_on_the_host() -> None:
    batches = [(torch.randn(16, 8), torch.randn(16, 4)) for _ in range(4)]

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    found = castwise.parity(net(), loss, batches, "bf16-master", optimizer=torch.optim.AdamW)
    assert found.verdict == "pass"
    assert castwise.forecast(net(), loss, batches, optimizer=torch.optim.AdamW).to_json()
    assert castwise.compare(net(), loss, batches[0], "fp32", "bf16-true").to_json()
