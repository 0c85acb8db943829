"""In-place writes across the border of a region: gradients equal those of a model without in-place writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from castwise import Amp
from tests.here import DEVICE

LINE = "bf16-mixed+ops.exp=fp32+regions.inner=fp32"
SAME = f"{LINE}+regions.first=fp32"
"""``inner`` gets a tensor that already has its format, so nothing is cast or copied."""


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


INNER = {
    "its output": lambda: nn.Linear(8, 8),
    "its input, which it returns": nn.Identity,
    "a view of its input": Flat,
    "a view of its output": lambda: nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (8, 1)), nn.Flatten(1)),
    "its input, inside": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)),
}


class Residual(nn.Module):
    """Writes in place to the output of ``inner``; tensors that share its memory change too."""

    def __init__(self, inner: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.in_place = nn.Linear(8, 8), inner, nn.Linear(8, 1), in_place

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.inner(h)
        if y.requires_grad and isinstance(self.inner, nn.Linear):  # a hook like FSDP's on outputs
            y.register_hook(lambda gradient: 2.0 * gradient)
        if self.in_place:
            y += 0.5
        else:  # compute the values that h would have after the in-place write
            y = y + 0.5
            if isinstance(self.inner, (nn.Identity, Flat)):
                h = y
            elif isinstance(self.inner, nn.Sequential) and isinstance(self.inner[0], nn.ReLU):
                h = h.relu()
        return self.last(y.exp() + h)


@pytest.mark.parametrize("what", INNER)
def test_gradients_are_those_of_a_model_that_writes_nothing_in_place(what: str) -> None:
    found = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model = Residual(INNER[what](), in_place)
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = in_place
        with Amp(SAME, device=DEVICE) as amp:
            amp.backward(amp.prepare(model)(torch.linspace(-1, 1, 32).reshape(4, 8)).sum())
            found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Piece(nn.Module):
    """Runs again in backward, and records the dtype of each run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.runs: list[torch.dtype] = []

    def run(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.runs.append(y.dtype)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = Piece(), Piece(), Piece()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.before(x))
        y += x
        y = self.after(y)
        y *= 2.0
        return y


def test_what_is_written_to_is_made_again_in_its_own_format() -> None:
    with Amp(LINE, device=DEVICE) as amp, set_checkpoint_early_stop(False):
        model = amp.prepare(Pieces())
        amp.backward(model(torch.randn(4, 8, requires_grad=True)).sum())
        runs = [set(piece.runs) for piece in (model.before, model.inner, model.after)]
        assert runs == [{torch.bfloat16}, {torch.float32}, {torch.bfloat16}]
        assert [len(piece.runs) for piece in (model.before, model.inner, model.after)] == [2, 2, 2]
