"""A prepared model trained without being called: backward raises an error before it adds any gradient."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import Amp, Plan, Region
from castwise.core.session import bypass
from castwise.errors import StateError
from tests.here import DEVICE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.encoder(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


class Holder(nn.Module):
    """A module that only holds other modules and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)


def one_by_one(model: Any, x: torch.Tensor) -> torch.Tensor:
    for part in model.values() if isinstance(model, nn.ModuleDict) else model.children():
        x = part(x)
    return x


BYPASSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "ModuleDict": (lambda: nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 1)}), one_by_one),
    "ModuleList": (lambda: nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 1)]), one_by_one),
    "Sequential": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), one_by_one),
    "holder": (Holder, one_by_one),
    "forward": (Net, lambda model, x: model.forward(x)),
    "parts": (Net, lambda model, x: model.head(model.norm(model.encoder(x)))),
    "one part": (Net, lambda model, x: model.encoder(x)),
    "method": (Net, lambda model, x: model.encode(x)),
    "ParameterList": (lambda: nn.ParameterList([torch.ones(8, 1)]), lambda model, x: x @ model[0]),
    "checkpointed": (Net, lambda model, x: checkpoint(model.forward, x, use_reentrant=False)),
}  # fmt: skip


def prepared(plan: Any, model: nn.Module, **how: Any) -> tuple[Amp, Any, torch.optim.Optimizer]:
    amp = Amp(plan, device=DEVICE)
    return amp, *amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), **how)


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "bf16-mixed+rules=cuda"])
@pytest.mark.parametrize("way", BYPASSES)
def test_backward_says_that_a_model_was_not_called(way: str, plan: str) -> None:
    make, run = BYPASSES[way]
    amp, model, _ = prepared(plan, make())
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):  # the error is raised again after it was caught
        with pytest.raises(StateError, match=r"backward: the loss was computed from .*was not called"):
            amp.backward(run(model, torch.randn(4, 8)).float().mean())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    amp.close()
    run(model, torch.randn(4, 8)).float().mean().backward()


@pytest.mark.parametrize("plan", ["bf16-master", "fp16-master", "bf16-master+rules=cuda"])
@pytest.mark.parametrize("way", BYPASSES)
def test_weights_that_are_stored_low_are_watched_too(way: str, plan: str) -> None:
    """A loop that casts its own inputs would bypass the plan's operator rules without an error from torch."""
    make, run = BYPASSES[way]
    amp, model, _ = prepared(plan, make())
    dtype = next(model.parameters()).dtype
    with pytest.raises(StateError, match=r"backward: the loss was computed from .*was not called"):
        amp.backward(run(model, torch.randn(4, 8, dtype=dtype)).float().mean())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["amp.autocast", "castwise.autocast", "torch.autocast"])
@pytest.mark.parametrize("plan", ["bf16-master", "bf16-mixed"])
def test_parts_that_are_called_inside_a_block_of_autocast_run_by_the_plan(plan: str, kind: str) -> None:
    amp, model, optimizer = prepared(plan, Net())
    for _ in range(3):
        block = {
            "amp.autocast": amp.autocast,
            "castwise.autocast": lambda: castwise.autocast("bf16", device_type=DEVICE),
            "torch.autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
        }[kind]()
        with block:
            loss = one_by_one(model, torch.randn(4, 8)).square().mean()
        amp.backward(loss)
        amp.step(optimizer)
        optimizer.zero_grad()
    amp.close()
    assert bypass._watched or not hasattr(torch.autocast.__enter__, "__wrapped__")


@pytest.mark.parametrize("way", BYPASSES)
@pytest.mark.parametrize(
    "call",
    [
        lambda amp, loss: loss.backward(),
        lambda amp, loss: amp.scale(loss).backward(),
        lambda amp, loss: torch.autograd.backward([loss, loss.detach().clone().requires_grad_()]),
        lambda amp, loss: amp.backward(loss, retain_graph=True),
    ],
)
def test_whoever_calls_backward_is_told(way: str, call: Callable[[Amp, torch.Tensor], object]) -> None:
    make, run = BYPASSES[way]
    amp, model, _ = prepared("bf16-mixed", make())
    loss = run(model, torch.randn(4, 8)).mean()
    with pytest.raises(StateError, match="was not called"):
        call(amp, loss)


def test_the_words() -> None:
    amp, model, _ = prepared("bf16-mixed", Net())
    with pytest.raises(StateError) as error:
        amp.backward(model.forward(torch.randn(4, 8)).mean())
    assert str(error.value) == (
        "backward: the loss was computed from encoder.weight, but the prepared Net was not called, so its operators were not "
        "cast to bfloat16 as the plan bf16-mixed says. A plan applies only when the module itself is called: call model(...), "
        "not "
        "model.forward(...) and do not call its parts one by one; or name the methods that are called instead of it, "
        "amp.prepare(model, optimizer, methods=('encode',)); or prepare each part that is called, amp.prepare(part, optimizer)."
    )


def test_each_cure_cures() -> None:
    amp, model, optimizer = prepared("bf16-mixed", Net(), methods=("encode",))
    amp.backward(model.encode(torch.randn(4, 8)).mean())
    amp.step(optimizer)
    parts = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 1)})
    amp, optimizer = Amp("bf16-mixed", device=DEVICE), torch.optim.SGD(parts.parameters(), 0.1)
    for part in parts.values():
        amp.prepare(part, optimizer)
    amp.backward(one_by_one(parts, torch.randn(4, 8)).mean())
    amp.step(optimizer)


@pytest.mark.parametrize("raw", [False, True])
def test_a_call_before_training_does_not_hide_it(raw: bool) -> None:
    """A call without gradients does not count. After one with gradients, as for a summary, the third pass raises."""
    amp, model, optimizer = prepared("bf16-mixed", Net())
    with torch.no_grad():
        model(torch.randn(2, 8))
    with pytest.raises(StateError, match="was not called"):
        amp.backward(model.forward(torch.randn(4, 8)).mean())
    amp, model, optimizer = prepared("bf16-mixed", Net())
    model(torch.randn(2, 8))

    def train() -> None:
        loss = model.forward(torch.randn(4, 8)).mean()
        loss.backward() if raw else amp.backward(loss)
        optimizer.step() if raw else amp.step(optimizer)
        optimizer.zero_grad()

    train()
    train()
    with pytest.raises(StateError, match="was not called"):
        train()


def test_a_region_in_a_format_of_its_own_counts_where_the_model_has_none() -> None:
    plan = Plan(compute="fp32", rules="native", regions=(Region("encoder", compute="bf16"),))
    amp, model, optimizer = prepared(plan, Net())
    amp.backward(model.forward(torch.randn(4, 8)).mean())  # the region itself is called
    amp.step(optimizer)
    amp, model, _ = prepared(plan, Net())
    loss = nn.functional.linear(torch.randn(4, 8), model.encoder.weight).mean()
    with pytest.raises(
        StateError,
        match=r"from encoder.weight, but the region 'encoder' \(Linear\) of the prepared Net was not",
    ):
        amp.backward(loss)  # fmt: skip


def no_alarm(plan: str = "bf16-mixed", make: Callable[[], nn.Module] = Net) -> tuple[Amp, Any, Any]:
    return prepared(plan, make())


@pytest.mark.parametrize("plan", ["fp32", "bf16-true", "naive", "O3"])
def test_plans_that_cast_no_operators_have_nothing_to_say(plan: str) -> None:
    amp, model, optimizer = prepared(plan, Net())
    dtype = model.encoder.weight.dtype
    amp.backward(model.forward(torch.randn(4, 8).to(dtype)).mean())
    amp.step(optimizer)


def test_a_gan_with_two_models_and_two_losses() -> None:
    amp = Amp("fp16-mixed", device=DEVICE)
    gen, gen_opt = amp.prepare(g := nn.Linear(8, 8), torch.optim.SGD(g.parameters(), 0.1))
    dis, dis_opt = amp.prepare(d := nn.Linear(8, 1), torch.optim.SGD(d.parameters(), 0.1))
    for _ in range(3):
        for _ in range(3):  # the critic trains first
            amp.backward(dis(gen(torch.randn(4, 8)).detach()).mean())
            amp.step(dis_opt)
            dis_opt.zero_grad()
        fake = gen(torch.randn(4, 8))
        amp.backward(dis(fake.detach()).mean())
        amp.step(dis_opt)
        amp.backward(-dis(fake).mean())
        amp.step(gen_opt)
        gen_opt.zero_grad()


def test_a_penalty_before_the_loss_a_second_loss_and_a_late_step() -> None:
    amp, model, optimizer = no_alarm()
    out = model(torch.randn(4, 8))
    amp.backward(sum(p.square().sum() for p in model.parameters()))
    amp.backward(out.mean(), retain_graph=True)
    amp.backward(out.square().mean())
    amp.step(optimizer)


def test_models_that_a_loss_does_not_reach() -> None:
    """Covers a frozen teacher, a model trained later, a model for inference only, and a hand-written loss."""
    amp, model, optimizer = no_alarm()
    teacher = amp.prepare(nn.Linear(8, 1).requires_grad_(False))
    other, _ = amp.prepare(m := nn.Linear(8, 1), torch.optim.SGD(m.parameters(), 0.1))
    fixed = amp.prepare(nn.Linear(8, 1), inference=True).float()
    x = torch.randn(4, 8)
    with torch.no_grad():
        target = other.forward(x)
    amp.backward((model(x) - teacher.forward(x) - target - fixed.forward(x).detach()).square().mean())
    amp.step(optimizer)


def test_what_no_plan_would_cast_needs_no_call() -> None:
    """Covers loose parameters, tables and norms; a matrix product with any of them does raise."""
    made: list[tuple[nn.Module, Callable[[Any], torch.Tensor]]] = [
        (nn.ParameterList([torch.ones(8)]), lambda model: (model[0] * 2).exp().sum()),
        (nn.ModuleList([nn.Embedding(4, 8), nn.LayerNorm(8)]), lambda model: model[1](model[0](torch.arange(4))).sum()),
    ]  # fmt: skip
    for model, run in made:
        amp, model, optimizer = prepared("bf16-mixed", model)
        for _ in range(3):
            amp.backward(run(model))
            amp.step(optimizer)
    amp, model, _ = prepared("bf16-mixed", made[0][0].__class__([torch.ones(8, 8)]))
    with pytest.raises(StateError, match="from 0, but the prepared ParameterList"):
        amp.backward((torch.ones(2, 8) @ model[0][:, :4].T.T).sum())


def test_pseudo_gradients_and_gradients_of_inputs_are_nobodys_forward() -> None:
    amp, model, optimizer = no_alarm()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    x = torch.randn(4, 8, requires_grad=True)
    torch.autograd.grad(model.forward(x).mean(), x)
    amp.grad(model.forward(x).mean(), [x])


def test_other_ways_to_run_by_the_plan() -> None:
    x = torch.randn(4, 8)
    amp, model, _ = no_alarm()
    amp.backward(torch.func.functional_call(model, dict(model.named_parameters()), (x,)).mean())
    amp, model, _ = no_alarm()
    amp.backward(checkpoint(model, x, use_reentrant=False).mean())
    amp, model, _ = no_alarm()
    amp.backward(checkpoint(model, x.requires_grad_(), use_reentrant=True).mean())
    amp, model, _ = no_alarm(make=Holder)
    with amp.autocast():
        loss = one_by_one(model, x).mean()
    amp.backward(loss)
    amp, model, _ = no_alarm(make=Holder)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = one_by_one(model, x).mean()
    loss.float().backward()
    amp, model, _ = no_alarm(make=lambda: nn.utils.spectral_norm(nn.Linear(8, 8)))
    for _ in range(3):  # spectral_norm computes the weight before the region's border
        amp.backward(model(x).mean())
    assert not bypass.watching(model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_models(backend: str, whole: bool) -> None:
    torch.compiler.reset()
    for _ in range(2):  # models of one class share compiled code
        amp, model, optimizer = no_alarm()

        def run(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return model(x).mean()

        compiled: Any = torch.compile(run if whole else model, backend=backend)
        for _ in range(2):
            amp.backward(compiled(torch.randn(4, 8)).mean())
            amp.step(optimizer)
            optimizer.zero_grad()
    torch.compiler.reset()


def test_nobody_looks_once_the_model_has_run() -> None:
    amp, model, _ = no_alarm()
    assert bypass.watching(model)
    amp.backward(model(torch.randn(4, 8)).mean())
    assert not bypass.watching(model)
    amp, model, _ = no_alarm()
    amp.close()
    assert not bypass.watching(model)
    model.forward(torch.randn(4, 8)).mean().backward()


@pytest.mark.parametrize("way", ["forward", "parts", "method"])
def test_a_model_that_is_no_longer_called_is_told_once(way: str) -> None:
    """A warning only, because the training so far followed the plan."""
    amp, model, optimizer = no_alarm(make=Net)
    x = torch.randn(4, 8)
    calls = [*[model] * 3, *[lambda x: BYPASSES[way][1](model, x)] * 4, *[model] * 2]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for call in calls:
            amp.backward(call(x).float().mean())
            amp.step(optimizer)
            optimizer.zero_grad()
    assert [str(one.message).partition(", so its")[0] for one in told] == [
        "backward: the loss was computed from encoder.weight, but the prepared Net was not called"
    ]


def test_another_backward_of_the_same_call_is_no_alarm() -> None:
    amp, model, _ = no_alarm(make=Net)
    x = torch.randn(4, 8)
    for _ in range(2):
        loss = model(x).mean()
        for _ in range(4):
            amp.backward(loss, retain_graph=True)
            amp.backward((model.encoder.weight @ model.encoder.weight.T).square().sum())


def test_a_copy_has_no_session_and_nobody_looks() -> None:
    _, model, _ = no_alarm()
    twin = copy.deepcopy(model)
    twin.forward(torch.randn(4, 8)).mean().backward()
    model(torch.randn(4, 8)).mean().backward()


def test_a_model_that_is_never_trained_is_not_looked_at_for_ever() -> None:
    _, model, _ = no_alarm()
    other = nn.Linear(8, 1)
    for _ in range(65):
        other(torch.randn(4, 8)).mean().backward()
    assert not bypass.watching(model)


class Solve(torch.autograd.Function):
    """Calls the module without gradients and again in backward, as implicit layers and adjoint methods do."""

    @staticmethod
    def forward(ctx: Any, model: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.model = model
        ctx.save_for_backward(x, *weights)
        return model(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            out = ctx.model(x)
        return (None, None, *torch.autograd.grad(out, weights, grads[0].to(out.dtype)))


class LinearSolve(Solve):
    """Has a name like a product operator's."""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(6, 8), nn.Linear(8, 8)

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(index) + x)


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "O1"])
def test_penalties_of_weights_alone_are_nobodys_forward(plan: str) -> None:
    """Before the first call and between two calls: a weight's Gram matrix, or an operator that is a product only by
    name.
    """
    net = Net()
    net.scale = nn.Parameter(torch.ones(1, 1, 4, 4))
    amp, model, optimizer = prepared(plan, net)
    penalties: list[Callable[[], torch.Tensor]] = [
        lambda: (model.encoder.weight @ model.encoder.weight.T - torch.eye(8)).square().sum(),
        lambda: torch.einsum("ij,kj->ik", model.encoder.weight, model.encoder.weight).square().sum(),
        lambda: torch.lgamma(model.scale + 1).sum() + torch.cummax(model.scale, -1).values.sum(),
        lambda: nn.functional.interpolate(model.scale, size=8, mode="bilinear").square().sum(),
    ]
    for penalty in penalties:
        for _ in range(3):
            amp.backward(penalty())
            amp.step(optimizer)
            optimizer.zero_grad()
    amp.backward(model(torch.randn(4, 8)).mean())
    assert not bypass.watching(model)


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "O1"])
def test_a_model_that_is_called_again_in_backward(plan: str) -> None:
    x = torch.randn(4, 8)
    for function in (Solve, LinearSolve):
        amp, model, optimizer = no_alarm(plan, lambda: nn.Linear(8, 8))
        for _ in range(3):
            amp.backward(function.apply(model, x, *model.parameters()).mean())
            amp.step(optimizer)
            optimizer.zero_grad()
    amp, model, optimizer = no_alarm(plan, Tied)
    loose = torch.zeros(4, 8, requires_grad=True)
    for _ in range(3):
        made = checkpoint(model, torch.arange(4), loose, use_reentrant=True)
        # Uses the tied weight outside the model.
        amp.backward(nn.functional.linear(made, model.table.weight).mean())
        amp.step(optimizer)
        optimizer.zero_grad()
    for _ in range(2):  # the last recomputation counts as a call
        amp.backward(nn.functional.linear(x, model.table.weight).mean())
    with pytest.raises(StateError, match=r"from table\.weight"):
        amp.backward(nn.functional.linear(x, model.table.weight).mean())


def test_graphs_that_are_older_than_the_border() -> None:
    x, model = torch.randn(4, 8), Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(x).mean()
    amp = Amp("fp32", device=DEVICE)
    amp.prepare(model, optimizer)
    amp.backward(loss)
    amp.step(optimizer)
    loss = model(x).mean()
    amp.change("bf16-mixed")
    amp.backward(loss)
    amp.step(optimizer)
    assert bypass.watching(model)
    with pytest.raises(StateError, match="was not called"):
        amp.backward(model.forward(x).mean())


BESIDE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a method": lambda model, x: model.encode(x),
    "a part": lambda model, x: model.encoder(x),
    "its weight": lambda model, x: x @ model.encoder.weight.t(),
    "forward": lambda model, x: model.forward(x),
}
"""Ways to compute a part of a loss from a model besides calling it."""


def trained_beside(plan: str, beside: Callable[[Any, torch.Tensor], torch.Tensor]) -> list[str]:
    amp = Amp(plan, device=DEVICE)
    model = amp.prepare(Net())
    x = torch.rand(4, 8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        amp.backward(model(x).mean() + beside(model, x).float().mean())
    amp.close()
    return [str(one.message) for one in said if "outside a call" in str(one.message)]


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("way", BESIDE)
def test_a_part_of_a_loss_beside_the_model_is_told(way: str, plan: str) -> None:
    (said,) = trained_beside(plan, BESIDE[way])
    assert "methods=('encode',)" in said
    assert plan in said


def _penalty_on_gradients(model: Any, x: torch.Tensor) -> torch.Tensor:
    given = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
    return gradient.float().square().sum()


@pytest.mark.parametrize(
    "beside",
    [
        _penalty_on_gradients,
        lambda model, x: sum(p.square().sum() for p in model.parameters()),
        lambda model, x: (model.encoder.weight @ model.encoder.weight.t()).square().sum(),
        lambda model, x: model.norm(x),
        lambda model, x: model(x),
    ],
)
def test_penalties_and_what_no_plan_casts_are_not(
    beside: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    assert not trained_beside("bf16-mixed", beside)


def test_nor_is_what_runs_by_the_plan_in_another_way() -> None:
    def in_a_block(model: Any, x: torch.Tensor) -> torch.Tensor:
        with castwise.autocast("bf16-mixed", device_type=DEVICE):
            return model.encode(x)

    assert not trained_beside("bf16-mixed", in_a_block)
    assert not trained_beside("fp32", BESIDE["a method"])
