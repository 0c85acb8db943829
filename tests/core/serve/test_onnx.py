"""Exported programs become ONNX through torch's exporter, and ONNX Runtime computes the same outputs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import castwise

pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")

pytestmark = [
    pytest.mark.cpu,  # ONNX Runtime's device here
    pytest.mark.filterwarnings("default"),  # of torch's exporter and of onnxscript
]
HALF_UNIT = 2.0**-11  # of fp16, relative


class Encoder(nn.Module):
    """A classifier with attention, a norm and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(nn.functional.gelu(self.first(x)))
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.last((x + mixed).mean(1)).softmax(-1)


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Hide that torchvision is missing, which torch's exporter reports for each of its operators."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)


@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed+ops.layer_norm=fp32", "fp16-true"])
def test_onnx_runtime_computes_the_outputs_of_the_prepared_model(plan: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Encoder().eval(), torch.randn(4, 7, 32)
    program = castwise.export(model, plan, (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
    path = tmp_path / "model.onnx"
    exported = torch.onnx.export(program, dynamo=True, verbose=False)
    assert exported is not None
    exported.save(str(path))
    session = runtime.InferenceSession(str(path))
    for batch in (x, torch.randn(9, 7, 32)):
        want = program.module()(batch)
        (found,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
        off = (torch.from_numpy(found).float() - want.float()).norm() / want.float().norm()
        # ONNX Runtime orders sums differently, so results of a low format differ by a few of its roundings.
        assert off <= (1e-6 if plan == "fp32" else 4 * HALF_UNIT)


def test_the_file_stores_weights_as_the_plan_does(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).eval(), torch.randn(1, 256)
    sizes = {}
    for plan in ("fp32", "fp16-mixed"):
        exported = torch.onnx.export(castwise.export(model, plan, (x,)), dynamo=True, verbose=False)
        assert exported is not None
        exported.save(str(tmp_path / f"{plan}.onnx"), external_data=False)
        sizes[plan] = (tmp_path / f"{plan}.onnx").stat().st_size
    assert sizes["fp16-mixed"] < 0.55 * sizes["fp32"]
