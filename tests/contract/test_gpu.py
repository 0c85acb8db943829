"""The contract on a GPU, for what a CPU cannot show: its own operator lists, TF32, fused optimizers, no waiting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import castwise
from castwise.plans.plan import PRESETS

from .models import CASES, Case

pytestmark = pytest.mark.gpu


def train(name: str, case: Case, steps: int, fused: bool = False) -> list[float]:
    model = case.build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    batch = tuple(tensor.cuda() for tensor in case.batch())
    losses = []
    with castwise.Amp(name, device="cuda") as amp:
        amp.prepare(model, optimizer)
        for _ in range(steps):
            loss = case.loss(model, batch)
            amp.backward(loss)
            amp.step(optimizer, max_norm=5.0)
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_learns(name: str, case: Case, fused: bool) -> None:
    losses = train(name, case, 40, fused)
    assert losses[-1] < 0.7 * losses[0]


def test_the_cuda_table_on_a_cpu_predicts_the_gpu() -> None:
    """The rules of CUDA on the CPU give every output the dtype that torch.autocast gives it on CUDA."""
    x = torch.rand(4, 4) + 0.5

    def outputs(x: torch.Tensor) -> list[torch.dtype]:
        y = x @ x
        return [
            t.dtype
            for t in (
                y, torch.exp(y), torch.softmax(y, -1), nn.functional.layer_norm(y, (4,)), y.sum(), torch.cumsum(y, 0),
                torch.cat([y, x]), nn.functional.gelu(y), y.pow(2), nn.functional.mse_loss(y, x), y + x,
            )
        ]  # fmt: skip

    with torch.autocast("cuda", dtype=torch.bfloat16):
        want = outputs(x.cuda())
    with castwise.autocast(castwise.Plan(compute="bf16", rules="cuda"), device_type="cpu"):
        assert outputs(x) == want


def test_fused_steps_do_not_wait_for_the_device() -> None:
    model = CASES["mlp"].build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    amp = castwise.Amp("fp16-mixed", device="cuda")
    amp.prepare(model, optimizer)
    batch = tuple(tensor.cuda() for tensor in CASES["mlp"].batch())
    for number in range(3):
        if number == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            amp.backward(CASES["mlp"].loss(model, batch))
            result = amp.step(optimizer)
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not result.skipped
    amp.close()
