"""Averages of weights are correct under every plan; an average that cannot be correct causes a warning."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import castwise
from castwise.core.masters import attachment_of, copies, is_low, master_of
from castwise.core.plans.plan import PRESETS
from tests.core.masters.presets import ALL
from tests.core.masters.test_masters_gradients import prepared
from tests.core.masters.test_masters_optimizers import batches, train
from tests.here import DEVICE
from tests.soak import each_value

DECAY = 0.99


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def trained(plan: str, steps: int, *averages: Any) -> tuple[castwise.Amp, Any, list[list[torch.Tensor]]]:
    """Train a model under a plan with averaging after each step; return it and its fp32 weights after each step."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    made = [average(model) for average in averages]
    history = []
    for x in batches(steps):
        amp.backward((model(x) - 1).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()
        for average in made:
            average.update_parameters(model)
        state = amp.model_state_dict(model)
        history.append([state[name].detach().clone() for name, _ in model.named_parameters()])
    return amp, (model, *made), history


KINDS: dict[str, Any] = {
    "swa": {},
    "ema-multi": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(DECAY)},
    "ema": {"avg_fn": swa_utils.get_ema_avg_fn(DECAY)},
    "buffers": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(DECAY), "use_buffers": True},
}


@each_value(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ALL)
def test_averages_are_those_of_the_masters(plan: str, kind: str) -> None:
    """The average is in fp32, of the full-precision weights at every step."""
    amp, (model, average), history = trained(
        plan, 12, lambda model: castwise.AveragedModel(model, **KINDS[kind])
    )
    want = [w.double() for w in history[0]]
    for count, weights in enumerate(history[1:], start=1):
        step = 1 / (count + 1) if kind == "swa" else 1 - DECAY
        want = [w + (new.double() - w) * step for w, new in zip(want, weights, strict=True)]
    for got, exact in zip(average.module.parameters(), want, strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.detach().double(), exact, rtol=1e-5, atol=1e-6)
    assert {v.dtype for v in average.state_dict().values() if v.is_floating_point()} <= {
        torch.float32,
        *(b.dtype for b in model.buffers()),
    }
    x = batches(1)[0]
    average.eval()
    out = average(x)
    assert out.dtype is torch.float32 if PRESETS[plan].output == "fp32" else True
    reference = make().eval()
    reference.load_state_dict({k: v.float() for k, v in average.module.state_dict().items()})
    # Tolerance: weights, activations and both matrix products are rounded to the plan's format (8 bits for bf16).
    torch.testing.assert_close(out.float(), reference(x), rtol=0.05, atol=0.05)
    assert not any(is_low(p) for p in average.parameters())
    torch.testing.assert_close(copy.deepcopy(average)(x), out, rtol=0, atol=0)
    if kind == "swa":  # the other averaging functions are nested and cannot be pickled
        again = pickle.loads(pickle.dumps(average))  # the unpickled average has no plan
        torch.testing.assert_close(again.state_dict(), average.state_dict(), rtol=0, atol=0)
    amp.close()


@pytest.mark.parametrize("plan", ALL)
def test_a_rule_of_ones_own_reads_the_sessions_weights(plan: str) -> None:
    """A custom averaging rule, as in the guide, reads weights from the session."""
    amp, (model, ema), history = trained(plan, 3, castwise.AveragedModel)
    start = [p.detach().clone() for p in ema.module.parameters()]
    weights = amp.model_state_dict(model)
    with torch.no_grad():
        for name, average in ema.module.named_parameters():
            average.lerp_(weights[name], 0.01)
    for average, before, new in zip(ema.module.parameters(), start, history[-1], strict=True):
        assert torch.equal(average.detach(), before.lerp(new, 0.01))
    amp.close()


def test_most_of_an_averages_movement_is_lost_without() -> None:
    """An average of the low-precision weights loses most of the movement; torch's AveragedModel causes one warning."""
    ema = swa_utils.get_ema_multi_avg_fn(DECAY)
    with pytest.warns(UserWarning, match=r"castwise\.AveragedModel") as said:
        amp, (_, low, full), history = trained(
            "bf16-master",
            30,
            lambda model: swa_utils.AveragedModel(model, multi_avg_fn=ema),
            lambda model: castwise.AveragedModel(model, multi_avg_fn=ema),
        )
    assert len([w for w in said if "AveragedModel" in str(w.message)]) == 1
    moved = [(w - v).abs().sum() for v, w in zip(history[0], full.module.parameters(), strict=True)]
    missed = [
        (w - v.float()).abs().sum() for v, w in zip(low.parameters(), full.module.parameters(), strict=True)
    ]
    assert missed[0] > moved[0] / 2
    amp.close()


def test_a_teacher_by_hand_is_noticed() -> None:
    """The teacher is a ``deepcopy`` updated in a hand-written loop."""
    model, optimizer = prepared()
    teacher = copy.deepcopy(model).requires_grad_(False)
    train(model, optimizer, 2)
    with torch.no_grad():
        for average, parameter in zip(teacher.parameters(), model.parameters(), strict=True):
            average.lerp_(parameter, 0.01)
    with pytest.warns(UserWarning, match=r"castwise\.AveragedModel"):
        train(model, optimizer, 1)


def _deepcopied(model: nn.Module) -> list[Tensor]:
    return [*copy.deepcopy(model).requires_grad_(False).parameters()]


def _cloned(model: nn.Module) -> list[Tensor]:
    return [p.clone().detach() for p in model.parameters()]


def _copied_each(model: nn.Module) -> list[Tensor]:
    return [copy.deepcopy(p).requires_grad_(False) for p in model.parameters()]


def _by_data(averages: list[Tensor], model: nn.Module) -> None:
    for average, parameter in zip(averages, model.parameters(), strict=True):
        average.data.lerp_(parameter.data, 0.01)


def _by_foreach(averages: list[Tensor], model: nn.Module) -> None:
    torch._foreach_lerp_([a.data for a in averages], [p.data for p in model.parameters()], 0.01)


@torch.no_grad()
def _by_difference(averages: list[Tensor], model: nn.Module) -> None:
    for average, parameter in zip(averages, model.parameters(), strict=True):
        average.sub_(0.01 * (average - parameter))


def _cloned_detached(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _cloned_data(model: nn.Module) -> list[Tensor]:
    return [p.data.clone() for p in model.parameters()]


def _copied_state(model: nn.Module) -> list[Tensor]:
    return list(copy.deepcopy(model.state_dict()).values())


def _cast_copy(model: nn.Module) -> list[Tensor]:
    return [p.detach().to(p.dtype, copy=True) for p in model.parameters()]


def _filled(model: nn.Module) -> list[Tensor]:
    return [torch.empty_like(p, requires_grad=False).copy_(p.detach()) for p in model.parameters()]


def _teacher(model: nn.Module) -> list[Tensor]:
    """Return a teacher's own parameters, which require gradients."""
    teacher = copy.deepcopy(model)
    averages = [nn.Parameter(p.detach().clone()) for p in teacher.parameters()]
    assert all(average.requires_grad for average in averages)
    return list(averages)


@torch.no_grad()
def _by_new_data(averages: list[Tensor], model: nn.Module) -> None:
    for average, parameter in zip(averages, model.parameters(), strict=True):
        average.data = average.data * DECAY + parameter.data * (1 - DECAY)


@torch.no_grad()
def _by_lerp(averages: list[Tensor], model: nn.Module) -> None:
    for average, parameter in zip(averages, model.parameters(), strict=True):
        average.lerp_(parameter.detach().to(average.dtype), 1 - DECAY)


@torch.no_grad()
def _by_foreach_difference(averages: list[Tensor], model: nn.Module) -> None:
    params = list(model.parameters())
    torch._foreach_sub_(averages, torch._foreach_sub(averages, params), alpha=0.01)


@torch.no_grad()
def _by_new_ones(averages: list[Tensor], model: nn.Module) -> None:
    for i, parameter in enumerate(model.parameters()):
        averages[i] = (1 - DECAY) * parameter.data + DECAY * averages[i]


@torch.no_grad()
def _by_new_clones(averages: list[Tensor], model: nn.Module) -> None:
    averages[:] = [
        ((1 - DECAY) * p.detach() + DECAY * a).clone()
        for a, p in zip(averages, model.parameters(), strict=True)
    ]


@torch.no_grad()
def _by_new_lerp(averages: list[Tensor], model: nn.Module) -> None:
    averages[:] = torch._foreach_lerp(averages, [p.detach() for p in model.parameters()], 1 - DECAY)


@pytest.mark.parametrize(
    ("begin", "update"),
    [
        (_deepcopied, _by_data),  # ema_pytorch
        (_deepcopied, _by_foreach),
        (_deepcopied, _by_difference),
        (_copied_each, _by_data),
        (_cloned, _by_difference),  # torch_ema, diffusers
        (_cloned, _by_foreach_difference),
        (_deepcopied, _by_new_data),  # lightly, byol_pytorch
        (_cloned_detached, _by_difference),
        (_cloned_data, _by_lerp),
        (_copied_state, _by_lerp),
        (_cast_copy, _by_lerp),
        (_filled, _by_lerp),
        (_teacher, _by_lerp),
        (_cloned_data, _by_new_ones),
        (_cloned_data, _by_new_clones),
        (_copied_state, _by_new_lerp),
    ],
)
def test_averages_of_libraries_are_noticed(begin: Any, update: Any) -> None:
    """Averages made by libraries cause one warning within a few steps."""
    model, optimizer = prepared()
    averages = begin(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(6):
            train(model, optimizer, 1)
            update(averages, model)
        train(model, optimizer, 1)
    assert ["castwise.AveragedModel(model, ...)" in str(w.message) for w in said] == [True]


@pytest.mark.parametrize("begin", [_cloned, _cloned_detached])
@pytest.mark.parametrize(
    "how", ["best", "noise", "once", "dropped", "forward", "source", "none", "kept", "noisy"]
)
def test_clones_that_are_no_averages_are_not_noticed(how: str, begin: Any) -> None:
    """Backups, buffers used for something else, freed clones and a constant teacher cause no warning."""
    model, optimizer = prepared()
    kept = begin(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(7):
            train(model, optimizer, 1)
            for clone, parameter in zip(kept, model.parameters(), strict=False):
                if how == "best":
                    clone.copy_(parameter.detach())
                elif how == "noise":
                    clone.normal_()
                elif how == "once" and step == 1:
                    clone.mul_(1.01)
                elif how == "forward":
                    parameter.clone().mul_(1.01)
            if how == "dropped":
                kept.clear()
            if how == "kept":
                kept = begin(model)
            if how == "noisy":
                kept = [p.detach() * (1 + 0.05 * torch.randn_like(p)) for p in model.parameters()]
            if how == "source":
                kept = [p.detach() for p in model.parameters()]
        train(model, optimizer, 1)


def test_a_model_that_clones_its_weights_in_forward_leaves_nothing_behind() -> None:
    model, _ = prepared()
    for _ in range(3000):
        model.a.weight.clone().mul_(2)
    assert len(copies._clones) < 2000


def test_an_average_that_is_put_into_the_model_reaches_the_masters() -> None:
    """When the saved weights are put back afterwards, the masters are restored bit for bit."""
    model, optimizer = prepared()
    train(model, optimizer, 2)
    masters: list[Any] = [master_of(p) for p in model.parameters()]
    before = [master.detach().clone() for master in masters]
    kept = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.copy_(torch.ones_like(p))
    model(batches(1)[0].to(model.a.weight.dtype))
    for p, clone in zip(model.parameters(), kept, strict=True):
        p.data.copy_(clone.data)
    attachment_of(optimizer).settle()  # type: ignore[union-attr]
    for master, want in zip(masters, before, strict=True):
        assert torch.equal(master, want)
    for p in model.parameters():
        p.data.fill_(0.5)
    attachment_of(optimizer).settle()  # type: ignore[union-attr]
    assert all((master == 0.5).all() for master in masters)


@pytest.mark.parametrize("how", ["nothing", "copied", "loaded", "fp32", "trained"])
def test_other_copies_are_not_noticed(how: str) -> None:
    """No warning for a copied target network, a checkpoint, a copy with its own masters or a copy in fp32."""
    model, optimizer = prepared()
    other = copy.deepcopy(model)
    if how == "trained":
        amp = castwise.Amp("bf16-master", device=DEVICE)
        own = torch.optim.SGD(other.parameters(), lr=0.1)
        amp.prepare(other, own)
        train(other, own, 2)
    if how == "fp32":
        other.float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            train(model, optimizer, 1)
            with torch.no_grad():
                if how == "copied":
                    for average, parameter in zip(other.parameters(), model.parameters(), strict=True):
                        average.copy_(parameter)
                elif how == "loaded":
                    other.load_state_dict({k: v + step for k, v in model.state_dict().items()})
                elif how == "fp32":
                    other.a.weight.add_(1)
        train(model, optimizer, 1)


def test_an_average_made_before_prepare_is_fp32() -> None:
    """An average made before prepare also reads the masters."""
    model = make()
    average = castwise.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with castwise.Amp("fp16-master", device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        for x in batches(2):
            amp.backward(model(x).square().mean())
            amp.step(optimizer)
            optimizer.zero_grad()
            average.update_parameters(model)
        state = amp.model_state_dict(model)
        for name, value in average.module.named_parameters():
            assert torch.equal(value.detach(), state[name])
        average.eval()
        assert average(batches(1)[0]).dtype is torch.float32


@pytest.mark.parametrize("affine", [True, False])
def test_statistics_that_are_near_to_a_weight_are_not_noticed(affine: bool) -> None:
    """A running variance starts at one, like the weights of norms, and causes no warning."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.BatchNorm1d(16, affine=affine), nn.Linear(16, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with castwise.Amp("naive", device=DEVICE) as amp, warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.prepare(model, optimizer)
        for x in batches(8):
            amp.backward(model(x).square().mean())
            amp.step(optimizer)
            optimizer.zero_grad()


@pytest.mark.parametrize("average", [False, True])
def test_a_search_reads_each_tensor_once_however_many_layers_are_alike(
    monkeypatch: pytest.MonkeyPatch, average: bool
) -> None:
    """A mixture of experts has thousands of equal layers, and a reference model beside it as many candidates again."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(60))).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp = castwise.Amp("bf16-master", device=DEVICE)
    amp.prepare(model, optimizer)
    others = [weight.detach().clone() for weight in model.parameters()]
    read, sample = [], copies._sample
    monkeypatch.setattr(copies, "_sample", lambda tensor: read.append(tensor) or sample(tensor))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            amp.backward(model(torch.randn(4, 8, device=DEVICE)).square().sum())
            amp.step(optimizer)
            optimizer.zero_grad()
            if average and step > 2:
                torch._foreach_lerp_(others, [weight.detach() for weight in model.parameters()], 0.1)
    assert (
        0 < len(read) <= 2 * 3 * len(others)
    )  # two searches, each of the parameters, their masters' and the others
    told = [str(one.message) for one in caught if "being updated" in str(one.message)]
    assert bool(told) is average
    amp.close()
