"""The comparison of a plan's updates with fp32's, checked against values computed by hand and real training."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise import Plan
from castwise.lab.parity import updates
from castwise.lab.parity.updates import (
    AFTER,
    COMPARED,
    LOST,
    Training,
    UpdateLoss,
    UpdateTest,
    is_needed,
    update_loss,
)
from castwise.lab.timing.runners import TrainingRun
from tests.core.masters.test_dropped_updates import Signs
from tests.here import DEVICE

HERE = torch.device(DEVICE)
TRUE = Plan.preset("bf16-true")
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Weights(nn.Module):
    """A parameter whose gradient under :func:`_push` is the batch itself."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(values.clone())


def _push(model: nn.Module, batch: Tensor) -> Tensor:
    return (model.w * batch).sum()


def _batches(batch: Tensor) -> Iterator[Tensor]:
    """Yield a batch and its negative in turn, so the weights stay nearly constant."""
    return itertools.cycle((batch, -batch))


def _sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def _found(plan: Plan, weights: Tensor, push: Tensor, make: Make = _sgd) -> UpdateLoss:
    return update_loss(Training(Weights(weights), _push, _batches(push), make, HERE), plan)


def mlp(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def data(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    truth = torch.randn(16, 4, generator=torch.Generator(DEVICE).manual_seed(7))
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        x = torch.randn(64, 16, generator=generator)
        yield x, (x @ truth).argmax(1)


def job(make: Make, plan: Plan | str) -> UpdateLoss:
    chosen = plan if isinstance(plan, Plan) else Plan.parse(plan)
    return update_loss(Training(mlp(), loss, data(0), make, HERE), chosen)


@pytest.mark.parametrize(("plan", "last_place"), [("bf16-true", 2.0**-7), ("fp16-true", 2.0**-10)])
def test_the_share_is_of_the_update_and_not_of_elements(plan: str, last_place: float) -> None:
    """The updates of seven of eight elements are lost, but these are only a fiftieth of the squared update."""
    push = last_place * torch.tensor([0.2] * 7 + [4.0])
    found = _found(Plan.preset(plan), torch.full((8,), 1.5), push)
    square = float((push / last_place).square().sum())
    assert found.lost == pytest.approx(0.28 / square, abs=2e-3)
    assert not found.why
    assert found.steps == AFTER[-1] + COMPARED


@pytest.mark.parametrize(("plan", "last_place"), [("bf16-true", 2.0**-7), ("fp16-true", 2.0**-10)])
def test_updates_below_half_of_the_last_place_are_lost(plan: str, last_place: float) -> None:
    found = _found(Plan.preset(plan), torch.full((8,), 1.5), 0.3 * last_place * torch.ones(8))
    assert found.lost == 1.0
    assert found.why == "rounding loses 100% of the optimizer's update of w at step 3"


def test_a_small_group_is_not_hidden_by_a_large_one() -> None:
    def two(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        *most, last = params
        return torch.optim.Adam([{"params": most, "lr": 1e-2}, {"params": [last], "lr": 1e-6}])

    found = job(two, TRUE)
    assert found.lost > 0.9
    assert found.where == "4.bias"


def test_updates_that_become_small_late_are_seen_late() -> None:
    found = job(lambda p: torch.optim.Adam(p, lr=1e-3), TRUE)
    assert found.lost > LOST
    assert found.step > AFTER[2]


def test_sgd_with_momentum_may_drop_many_elements() -> None:
    found = job(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), TRUE)
    assert abs(found.lost) < LOST
    assert not found.why


FP16 = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}  # fmt: skip


@pytest.mark.parametrize("make", FP16.values(), ids=FP16)
def test_an_optimizer_whose_arithmetic_fails_in_fp16_is_refused(make: Make) -> None:
    found = job(make, "fp16-true")
    assert found.why
    assert found.step <= AFTER[-1] + COMPARED


def test_the_same_optimizer_with_an_eps_that_fp16_holds_is_not_broken() -> None:
    def square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 1e3 * loss(model, batch)  # large enough for the second moments in fp16

    training = Training(mlp(), square, data(0), lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3), HERE)
    assert not update_loss(training, Plan.parse("fp16-true")).broken


REGION = castwise.Region("2", compute="bf16", params="bf16")
KEPT = {
    "bf16-master": Plan.preset("bf16-master"),
    "fp16-master": Plan.preset("fp16-master"),
    "region": Plan(compute="bf16", regions=(REGION,)),
}


@pytest.mark.parametrize("plan", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("lr", [1e-5, 1e-2])
def test_masters_lose_nothing(plan: Plan, lr: float) -> None:
    found = job(lambda p: torch.optim.Adam(p, lr=lr), plan)
    assert abs(found.lost) < 1e-3
    assert found.steps == AFTER[1] + COMPARED


def test_a_region_stored_low_without_masters_loses_its_updates() -> None:
    plan = Plan(compute="bf16", master="none", regions=(REGION,))
    assert plan.lacks_masters
    assert job(lambda p: torch.optim.Adam(p, lr=1e-5), plan).lost > LOST


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_plans_that_store_fp32_are_not_tested(plan: str) -> None:
    assert not is_needed(Plan.preset(plan))
    made: list[torch.optim.Optimizer] = []

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(params, lr=0.1))
        return made[-1]

    castwise.parity(mlp(), loss, data, plan, optimizer=make)
    assert not made[0].state
    assert len(made) == 1  # only to read the optimizer's type


def test_an_optimizer_that_needs_a_closure_is_tested_by_rounding_its_update() -> None:
    found = job(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2), TRUE)
    assert found.steps == AFTER[-1] + COMPARED
    assert found.lost > -0.5


def test_an_optimizer_that_refuses_the_state_is_tested_by_rounding_its_update() -> None:
    class Refuses(torch.optim.SGD):
        def load_state_dict(self, state_dict: object) -> None:
            raise ValueError("no")

    assert job(lambda p: Refuses(p, lr=1e-6), TRUE).lost == 1.0


@pytest.mark.parametrize(
    ("way", "everywhere"),
    [
        ("kahan", False),
        ("kahan", True),
        ("textbook", True),
        ("copy", True),
        ("random", False),
        ("bits", False),
    ],
)
def test_an_optimizer_that_keeps_what_rounding_drops_loses_nothing(way: str, everywhere: bool) -> None:
    found = job(lambda p: Signs(p, way, 1e-5, everywhere=everywhere), TRUE)
    assert not found.why
    assert found.steps == AFTER[-1] + COMPARED


def test_steps_that_are_too_large_are_not_excused_because_no_element_is_dropped() -> None:
    found = job(lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-6), "fp16-true")
    assert "times as far as in fp32" in found.why


def test_one_that_keeps_nothing_loses_all() -> None:
    assert job(lambda p: Signs(p, "dropped", 1e-5), TRUE).lost > 0.9


def test_what_does_not_move_loses_nothing() -> None:
    found = _found(TRUE, torch.ones(3), torch.zeros(3))
    assert (found.lost, found.why) == (0.0, "")


def test_frozen_parameters_do_not_count() -> None:
    model = Weights(torch.full((2,), 1.5))
    model.frozen = nn.Parameter(torch.ones(1000), requires_grad=False)
    training = Training(model, _push, _batches(torch.full((2,), 1e-6)), _sgd, HERE)
    assert update_loss(training, TRUE).lost == 1.0


def test_the_model_is_not_trained() -> None:
    model = Weights(torch.ones(3))
    update_loss(Training(model, _push, _batches(torch.ones(3)), _sgd, HERE), TRUE)
    assert torch.equal(model.w, torch.ones(3))
    assert model.w.grad is None


@pytest.mark.parametrize("plan", ["bf16-true", "bf16-master"])
def test_parameters_outside_the_model_are_restored(plan: str) -> None:
    scale = nn.Parameter(torch.ones(()))

    def scaled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]) * scale, batch[1])

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([*params, scale], lr=0.1)

    assert castwise.parity(mlp(), scaled, data, plan, optimizer=make)
    assert (scale.item(), scale.grad) == (1.0, None)
    job = castwise.Workload("scaled", mlp, make, data, scaled)
    with contextlib.closing(TrainingRun(job, Plan.parse(plan), HERE)) as run:
        run.block(3)
        assert scale.item() != 1.0
    assert (scale.item(), scale.grad) == (1.0, None)


def test_only_fp32_parameters_are_stored_low() -> None:
    small = 1e-3 * torch.ones(4)
    exact = Weights(torch.ones(4, dtype=torch.complex64))
    training = Training(exact, lambda m, b: (m.w * b).sum().imag, _batches(small), _sgd, HERE)
    assert update_loss(training, TRUE).lost == pytest.approx(0.0, abs=1e-6)
    assert _found(TRUE, torch.ones(4).double(), small).lost == pytest.approx(0.0, abs=1e-6)
    assert _found(TRUE, torch.ones(4), small).lost == 1.0


def test_stages_come_later_and_later_and_say_how_long_the_next_one_takes() -> None:
    test = UpdateTest(Training(mlp(), loss, data(0), lambda p: torch.optim.Adam(p, lr=1e-2), HERE), TRUE)
    steps = []
    while test.next_s is not None:
        assert not steps or test.next_s > 0.0
        steps.append(test.stage().steps)
    assert steps == [after + COMPARED for after in AFTER]


class _Hidden(torch.optim.Optimizer):
    """SGD with momentum that is missing from the state dict."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.momenta: dict[Tensor, Tensor] = {}

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.momenta.setdefault(p, torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.data.sub_(group["lr"] * momentum)


class _Noisy(torch.optim.SGD):
    """SGD that adds random numbers in each step (Langevin dynamics)."""

    def step(self, closure: object = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(torch.randn_like(p), alpha=0.1 * group["lr"])


@pytest.mark.parametrize("optimizer", [_Hidden, _Noisy])
@pytest.mark.parametrize("plan", ["bf16-master", "bf16-true"])
def test_a_step_that_cannot_be_repeated_is_tested_by_rounding_the_update(
    optimizer: type[torch.optim.Optimizer], plan: str
) -> None:
    def make(lr: float) -> Make:
        return lambda params: optimizer(params, lr=lr)  # type: ignore[call-arg]

    assert not job(make(0.1), plan).why
    assert ("rounding loses" in job(make(1e-5), plan).why) == (plan == "bf16-true")


@pytest.mark.parametrize("which", ["all", "one"])
def test_without_an_update_in_fp32_nothing_is_known(which: str) -> None:
    def rest(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        *most, last = params
        return torch.optim.SGD([{"params": most, "lr": 0.1 * (which == "one")}, {"params": [last]}], lr=0.0)

    found = job(rest, TRUE)
    assert not found.why
    assert found.still == ("4.bias" if which == "one" else "0.weight, 0.bias and 3 more")
    result = castwise.parity(mlp(), loss, data, "bf16-true", optimizer=rest)
    assert result.verdict == "undecided"
    assert result.reason.endswith("give an optimizer whose learning rate is above 0")
    assert castwise.parity(mlp(), loss, data, "bf16-master", optimizer=rest)


def test_a_training_that_diverges_in_fp32_says_nothing_of_the_plan() -> None:
    found = job(lambda p: torch.optim.SGD(p, lr=1e30), TRUE)
    assert not found.broken


def test_one_update_is_that_of_the_step_after_the_warm_ones() -> None:
    training = Training(Weights(torch.ones(3)), _push, iter([torch.ones(3)] * 5), _sgd, HERE)
    found = list(updates.one_update(training))
    assert [name for name, _, _ in found] == ["w"]
    assert torch.equal(found[0][1].cpu(), torch.full((3,), 1.0 - updates.WARM_STEPS, device="cpu"))
    assert torch.equal(found[0][2].cpu(), -torch.ones(3, device="cpu"))


def test_the_first_step_is_compared_too() -> None:
    """Adagrad's sum of squares is 0 before it; in fp16 it stays 0, and the step divides by it."""
    found = job(lambda params: torch.optim.Adagrad(params, lr=1e-2), "fp16-true")
    assert found.broken.endswith("where fp32 stays finite"), found
    assert found.step <= 1
