"""A wrapper writes weights from overflowed gradients while several processes train the same model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import castwise
from tests.distributed.world import World


class Climbs(torch.optim.Optimizer):
    """Climbs along the gradient and steps from there, as sharpness-aware minimisation does."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})  # type: ignore[arg-type]
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups
        self.climbed: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def climb(self) -> None:
        params = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in params]).norm()
        self.climbed = [(each, 0.05 * each.grad / norm) for each in params]
        for each, move in self.climbed:
            each.add_(move)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for each, move in self.climbed:
            each.sub_(move)
        self.base.step()


def train(rank: int, size: int) -> tuple[dict[str, torch.Tensor], float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = Climbs(model.parameters())
    amp = castwise.Amp("fp16-mixed+loss_scale.init=1e30", device="cpu")
    model, optimizer = amp.prepare(model, optimizer)
    net = DistributedDataParallel(model)
    for step in range(6):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(16, 8)
        amp.backward(net(x).pow(2).mean())
        amp.unscale_(optimizer)
        optimizer.climb()
        amp.backward(net(x).pow(2).mean())
        amp.step(optimizer)
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}, amp.get_scale()


def test_an_overflow_before_a_climb_leaves_equal_and_finite_weights_on_all_ranks(two: World) -> None:
    (first, scale), (second, other) = two.run(train)
    assert scale == other < 1e30
    for name, value in first.items():
        assert value.isfinite().all(), name
        assert torch.equal(value, second[name]), name
