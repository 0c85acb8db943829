"""``convert_to_amp`` compared with loops by hand: equal skips and loss scales, weights within a tolerance."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise.bridges.compat.colossalai.amp import (
    AMP_TYPE,
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_naive_amp,
    convert_to_torch_amp,
)
from castwise.bridges.compat.colossalai.utils import load_checkpoint, save_checkpoint
from castwise.errors import StateError

STEPS = 12
NORM = 1.0
TOLERANCE = 2e-3
"""Absolute tolerance for weights that change by 0.3; fp16 has 11 bits, and momentum accumulates errors."""
LOSS = nn.functional.mse_loss


def build(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    between: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(8, 16), *between, nn.ReLU(), nn.Linear(16, 4))


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(32, 8, generator=generator)
        y = torch.stack([x[:, :4].sum(1), x[:, 0] * x[:, 1], x[:, 2].abs(), x[:, 3:].mean(1)], 1)
        # two steps in a row, and a third one later, overflow fp16 at any loss scale
        yield (x * 1e6, y) if step in (3, 4, 8) else (x, y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


@dataclass
class Trace:
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def drop_in(mode: AMP_TYPE, norm: bool = False, clip: bool = True, **options: Any) -> Trace:
    """Train in the loop of Colossal-AI's documentation."""
    model = build(norm)
    optimizer = sgd(model)
    trace = Trace()
    if mode is AMP_TYPE.NAIVE and clip:
        options["clip_grad_norm"] = NORM
    model, optimizer, criterion = convert_to_amp(model, optimizer, LOSS, mode, options)
    for x, y in batches():
        before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        optimizer.zero_grad()
        optimizer.backward(criterion(model(x), y))
        if clip and mode is not AMP_TYPE.NAIVE:
            optimizer.clip_grad_norm(model, NORM)
        returned = optimizer.step()
        after = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        skipped = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        if mode is AMP_TYPE.NAIVE:
            assert returned[0] is not skipped
            trace.norms.append(returned[1] if returned[0] and clip else float("nan"))
        else:
            assert returned is None
        trace.skipped.append(skipped)
        trace.scales.append(optimizer.loss_scale)
    trace.weights = optimizer.amp.model_state_dict(model)
    optimizer.amp.close()
    return trace


def by_torch(scale: float, interval: int) -> Trace:
    """Train with torch.autocast and torch's GradScaler."""
    model = build()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    trace = Trace()
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = LOSS(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
        trace.skipped.append(not torch.isfinite(norm).item())
        scaler.step(optimizer)
        scaler.update()
        trace.scales.append(scaler.get_scale())
    trace.weights = dict(model.state_dict())
    return trace


def by_hand(scale: float, interval: int, hysteresis: int) -> Trace:
    """Train with fp16 weights, fp32 masters and the rule of ``DynamicGradScaler``, by hand."""
    model = build().half()
    params = list(model.parameters())
    owned = [nn.Parameter(p.detach().float()) for p in build().parameters()]
    optimizer = torch.optim.SGD(owned, 0.05, momentum=0.9)
    trace, overflows, good = Trace(), 0, 0
    for x, y in batches():
        (LOSS(model(x.half()).float(), y) * scale).backward()
        for own, p in zip(owned, params, strict=True):
            own.grad, p.grad = p.grad.float() / scale, None
        overflow = any(not torch.isfinite(own.grad).all() for own in owned)
        if overflow:
            overflows, good = overflows + 1, 0
            if overflows >= hysteresis:
                scale /= 2
        else:
            good += 1
            if good == interval:
                scale, good, overflows = scale * 2, 0, 0
            trace.norms.append(float(nn.utils.clip_grad_norm_(owned, NORM)))
            optimizer.step()
            with torch.no_grad():
                for own, p in zip(owned, params, strict=True):
                    p.copy_(own)
        trace.skipped.append(overflow)
        trace.scales.append(scale)
    names = [name for name, _ in model.named_parameters()]
    trace.weights = dict(zip(names, [own.detach() for own in owned], strict=True))
    return trace


def in_fp64(skipped: list[bool]) -> dict[str, Tensor]:
    """Train in fp64 without the skipped steps and return the weights."""
    model = build().double()
    optimizer = sgd(model)
    for (x, y), skip in zip(batches(), skipped, strict=True):
        if not skip:
            optimizer.zero_grad()
            LOSS(model(x.double()), y.double()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
    return dict(model.state_dict())


def check(got: Trace, want: Trace) -> None:
    assert got.skipped == want.skipped
    assert got.scales == want.scales
    truth = in_fp64(want.skipped)
    moved = max(float((truth[name] - value).abs().max()) for name, value in build().state_dict().items())
    assert moved > 0.1
    for name, value in want.weights.items():
        torch.testing.assert_close(got.weights[name], value, atol=TOLERANCE, rtol=0, msg=name)
        torch.testing.assert_close(got.weights[name].double(), truth[name], atol=TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**16])
def test_the_torch_mode_is_torchs_own(scale: float) -> None:
    want = by_torch(scale, 3)
    assert sum(want.skipped) >= 3
    check(drop_in(AMP_TYPE.TORCH, init_scale=scale, growth_interval=3), want)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_naive_mode_is_masters_and_the_counted_overflows(hysteresis: int) -> None:
    want = by_hand(2.0**10, 4, hysteresis)
    got = drop_in(AMP_TYPE.NAIVE, initial_scale=2**10, growth_interval=4, hysteresis=hysteresis)
    check(got, want)
    norms = [norm for norm, skip in zip(got.norms, got.skipped, strict=True) if not skip]
    assert norms == pytest.approx(want.norms, rel=2e-2)


def test_hysteresis_makes_a_difference() -> None:
    scales = [by_hand(2.0**10, 4, hysteresis).scales for hysteresis in (1, 2, 3)]
    assert len({tuple(each) for each in scales}) == 3


# --- properties from Colossal-AI's own tests ------------------------------------------------------------------


def finite_batches() -> Iterator[tuple[Tensor, Tensor]]:
    return ((x, y) for step, (x, y) in enumerate(batches()) if step not in (3, 4, 8))


def trained(mode: AMP_TYPE, **options: Any) -> dict[str, Tensor]:
    model = build(norm=True)
    optimizer = sgd(model)
    model, optimizer, criterion = convert_to_amp(model, optimizer, LOSS, mode, options)
    for x, y in finite_batches():
        optimizer.zero_grad()
        optimizer.backward(criterion(model(x), y))
        optimizer.step()
    weights = {name: value.clone() for name, value in optimizer.amp.model_state_dict(model).items()}
    optimizer.amp.close()
    return weights


def test_naive_is_apex_o2_without_kept_batch_norms() -> None:
    naive = trained(AMP_TYPE.NAIVE, initial_scale=128)
    apex = trained(AMP_TYPE.APEX, opt_level="O2", loss_scale=128, keep_batchnorm_fp32=False)
    for name, value in apex.items():
        assert torch.equal(naive[name], value), name
    kept = trained(AMP_TYPE.APEX, opt_level="O2", loss_scale=128)
    assert not torch.equal(kept["1.running_var"], apex["1.running_var"])


def test_torch_is_near_apex_o1() -> None:
    by_autocast = trained(AMP_TYPE.TORCH, init_scale=128)
    apex = trained(AMP_TYPE.APEX, opt_level="O1", loss_scale=128)
    for name, value in apex.items():
        torch.testing.assert_close(by_autocast[name], value, atol=TOLERANCE, rtol=TOLERANCE, msg=name)


# --- formats and outputs ---------------------------------------------------------------------------------------


def seen_in(mode: AMP_TYPE, **options: Any) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of BatchNorm's weights, of the output, and of a product inside the criterion."""
    seen: list[torch.dtype] = []

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        seen.append((output.float() @ output.float().T).dtype)
        return LOSS(output.float(), target)

    model = build(norm=True)
    model, optimizer, wrapped = convert_to_amp(model, sgd(model), criterion, mode, options)
    x, y = next(batches())
    output = model(x)
    wrapped(output, y)
    norm = model[1].weight.dtype
    optimizer.amp.close()
    return norm, output.dtype, seen[0]


HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("mode", "options", "want"),
    [
        (AMP_TYPE.TORCH, {}, (FULL, HALF, HALF)),
        (AMP_TYPE.APEX, {"opt_level": "O1"}, (FULL, HALF, HALF)),
        (AMP_TYPE.APEX, {"opt_level": "O2"}, (FULL, FULL, FULL)),
        (AMP_TYPE.NAIVE, {}, (HALF, FULL, FULL)),
        (AMP_TYPE.NAIVE, {"dtype": "bf16"}, (torch.bfloat16, FULL, FULL)),
        (AMP_TYPE.APEX, {"enabled": False}, (FULL, FULL, FULL)),
    ],
)
def test_formats(mode: AMP_TYPE, options: dict[str, Any], want: tuple[torch.dtype, ...]) -> None:
    assert seen_in(mode, **options) == want


def test_zeros_in_the_gradients_are_counted_where_asked() -> None:
    model = nn.Linear(3, 2, bias=False)
    model, optimizer = convert_to_naive_amp(
        model, sgd(model), {"log_num_zeros_in_grad": True, "initial_scale": 16}
    )
    optimizer.backward(model(torch.tensor([[1.0, 0.0, 2.0]])).sum())
    assert optimizer.step() == (True, None, 2)
    optimizer.backward(model(torch.full((1, 3), 1e6)).sum())
    assert optimizer.step() == (False, None, None)
    assert model.weight.grad is None
    optimizer.amp.close()


def test_gradients_from_the_gradient_of_an_output() -> None:
    """A hand-written pipeline passes output gradients that already contain the loss scale."""
    model = nn.Linear(3, 2, bias=False)
    model, optimizer = convert_to_torch_amp(model, torch.optim.SGD(model.parameters(), 1.0))[:2]
    before = model.weight.detach().clone()
    for _ in range(2):
        output = model(torch.ones(1, 3))
        optimizer.zero_grad()
        optimizer.backward_by_grad(output, torch.full_like(output, optimizer.loss_scale / 4))
        optimizer.step()
    torch.testing.assert_close(before - model.weight, torch.full((2, 3), 0.5))
    optimizer.amp.close()


def test_a_closure_is_refused_with_the_way_out() -> None:
    model = nn.Linear(2, 2)
    model, optimizer = convert_to_apex_amp(model, sgd(model))
    with pytest.raises(StateError, match=r"amp.step"):
        optimizer.step(lambda: None)
    optimizer.amp.close()


def test_a_rate_scheduler_takes_either_optimizer() -> None:
    model = nn.Linear(2, 2)
    inner = sgd(model)
    before = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    model, optimizer = convert_to_naive_amp(model, inner, {"initial_scale": 16})
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    before.step()
    after.step()
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5 * 0.1)
    assert optimizer.optimizer is inner
    optimizer.amp.close()


# --- state -----------------------------------------------------------------------------------------------------


def halfway(mode: AMP_TYPE, state: Any = None, weights: Any = None) -> tuple[Any, Any, Any]:
    """Return new components, with a state loaded if one is given."""
    model = build()
    model, optimizer, criterion = convert_to_amp(model, sgd(model), LOSS, mode, {})
    if state is not None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    return model, optimizer, criterion


def run(parts: tuple[Any, Any, Any], data: list[tuple[Tensor, Tensor]]) -> None:
    model, optimizer, criterion = parts
    for x, y in data:
        optimizer.zero_grad()
        optimizer.backward(criterion(model(x), y))
        optimizer.step()


@pytest.mark.parametrize("mode", list(AMP_TYPE))
def test_training_goes_on_from_a_state(mode: AMP_TYPE) -> None:
    data = list(batches())
    parts = halfway(mode)
    run(parts, data[:6])
    file = io.BytesIO()
    torch.save((parts[1].state_dict(), copy.deepcopy(parts[0].state_dict())), file)
    run(parts, data[6:])
    file.seek(0)
    again = halfway(mode, *torch.load(file, weights_only=True))
    assert again[1].loss_scale < 2.0**16
    run(again, data[6:])
    assert again[1].loss_scale == parts[1].loss_scale
    for a, b in zip(parts[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(a, b)
    for each in (parts, again):
        each[1].amp.close()


@pytest.mark.parametrize(
    "options", [{"opt_level": "O2"}, {"opt_level": "O2", "cast_model_type": torch.bfloat16}]
)
def test_what_the_apex_mode_saves_of_a_model_in_half_is_fp32_and_whole(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        return convert_to_amp(
            model,
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
            nn.MSELoss(),
            AMP_TYPE.APEX,
            options,
        )

    data = [(torch.randn(16, 4), torch.randn(16, 2)) for _ in range(8)]
    parts = made()
    run(parts, data[:4])
    state = copy.deepcopy([part.state_dict() for part in parts[:2]])
    assert {v.dtype for v in state[0].values() if v.is_floating_point()} == {torch.float32}
    save_checkpoint(tmp_path / "saved", 1, *parts[:2])
    run(parts, data[4:])
    by_state, by_checkpoint = made(), made()
    for part, saved in zip(by_state, state, strict=False):
        part.load_state_dict(saved)
    load_checkpoint(tmp_path / "saved", *by_checkpoint[:2])
    for again in (by_state, by_checkpoint):
        run(again, data[4:])
        for a, b in zip(parts[0].state_dict().values(), again[0].state_dict().values(), strict=True):
            assert torch.equal(a, b)
        again[1].amp.close()
    parts[1].amp.close()


def test_a_state_of_colossal_ais_own_naive_optimizer_loads() -> None:
    """In such a state the scale is a tensor of one element, and there are no counters."""
    model, optimizer, _ = halfway(AMP_TYPE.NAIVE)
    owned = [[torch.full_like(p, 0.25) for p in group["params"]] for group in optimizer.param_groups]
    optimizer.load_state_dict(
        {
            "optimizer": optimizer.optimizer.state_dict(),
            "grad_scaler": {
                "scale": torch.tensor([512.0]), "growth_factor": 2, "backoff_factor": 0.5, "hysteresis": 2
            },
            "fp32_master_param_groups": owned,
        }
    )  # fmt: skip
    assert optimizer.loss_scale == 512.0
    assert all(bool((p == 0.25).all()) for p in model.parameters())
    optimizer.load_state_dict(optimizer.optimizer.state_dict())  # the inner optimizer's state alone loads too
    optimizer.amp.close()
