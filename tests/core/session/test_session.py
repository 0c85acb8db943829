"""Amp in common training loops, compared with hand-written ones."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import LossScale, Plan, Region
from castwise.core.casting import kernels
from castwise.errors import CheckpointError, DeviceError, PatternError, PlanError, StateError
from tests.here import DEVICE
from tests.soak import each_value

FP16 = Plan(compute="fp16", loss_scale=LossScale(init=1024.0))


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def data(n: int = 12, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(n, 8, generator=generator), torch.randn(n, 4, generator=generator)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def ready(
    plan: Any, rate: float = 0.1, model: nn.Module | None = None
) -> tuple[castwise.Amp, nn.Module, torch.optim.SGD]:
    model = mlp() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    return amp, model, optimizer


# --- equal to torch.amp by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_plans_equal_the_hand_written_loop_bit_for_bit(dtype: torch.dtype) -> None:
    """Covers forward, loss outside the region, scaling, clipping and skipped steps: the final weights are equal."""
    scaled = dtype is torch.float16
    model, batch = mlp(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**24, enabled=scaled)
    for _ in range(12):
        with torch.autocast(DEVICE, dtype=dtype):
            out = model(batch[0])
        loss = nn.functional.mse_loss(out.float(), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    plan = Plan(compute="fp16", loss_scale=LossScale(init=2.0**24)) if scaled else "bf16-mixed"
    amp, other, optimizer = ready(plan)
    skipped = 0
    for _ in range(12):
        amp.backward(loss_of(other, batch))
        skipped += amp.step(optimizer, max_norm=0.5).skipped
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert (skipped > 0) == scaled
    assert amp.get_scale() == (scaler.get_scale() if scaled else 1.0)


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", FP16, "bf16-master", "fp16-master"])
def test_accumulation_equals_one_large_batch(plan: Any) -> None:
    whole = data(12)
    updates = []
    for parts in (1, 3):
        amp, model, optimizer = ready(plan)
        start = amp.model_state_dict(model)
        start = {key: value.clone() for key, value in start.items()}
        for piece in zip(whole[0].chunk(parts), whole[1].chunk(parts), strict=True):
            amp.backward(loss_of(model, piece) / parts)
        amp.step(optimizer)
        updates.append({k: v - start[k] for k, v in amp.model_state_dict(model).items()})
        amp.close()
    for key in updates[0]:
        # Each chunk rounds its gradients to the compute format once: a few eps of the format.
        torch.testing.assert_close(updates[1][key], updates[0][key], rtol=0.05, atol=2e-3)


def test_several_forwards_one_backward_and_unused_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    for plan in ("bf16-mixed", FP16, "bf16-master"):
        amp, model, optimizer = ready(plan, model=Model())
        before = model.unused.weight.detach().clone()
        x, y = data()
        loss = nn.functional.mse_loss(model(x), y) + nn.functional.mse_loss(model(x * 2), y)
        amp.backward(loss)
        assert not amp.step(optimizer, max_norm=1.0).skipped
        assert torch.equal(model.unused.weight, before)
        assert model.used.weight.grad is not None
        amp.close()


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", FP16, "fp16-master"])
def test_gradient_penalty_by_double_backward(plan: Any) -> None:
    """The penalty's gradients, through two backward passes, equal fp64's within the format's rounding."""
    x, y = data()

    def total(model: nn.Module, grad: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype) if grad is None else x), y)
        params = tuple(model.parameters())
        if grad is None:
            grads = torch.autograd.grad(loss, params, create_graph=True)
        else:
            grads = grad(loss, params, create_graph=True)
        return loss + 0.1 * sum(g.pow(2).sum() for g in grads)

    exact = mlp().double()
    x64, y64 = x.double(), y.double()
    loss = nn.functional.mse_loss(exact(x64), y64)
    grads = torch.autograd.grad(loss, tuple(exact.parameters()), create_graph=True)
    (loss + 0.1 * sum(g.pow(2).sum() for g in grads)).backward()

    amp, model, optimizer = ready(plan)
    value = total(model, amp.grad)
    amp.backward(value)
    amp.unscale_(optimizer)
    for a, b in zip(model.parameters(), exact.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=0.05, atol=0.02 * float(b.grad.abs().max()))
    assert not amp.step(optimizer).skipped


# --- several models, losses, optimizers ---------------------------------------------------------------------


def test_backward_passes_on_what_torchs_takes() -> None:
    amp, model, _ = ready(FP16)
    first, *_, last = model.parameters()
    amp.backward(loss_of(model, data()), inputs=[last])
    assert first.grad is None
    assert last.grad is not None
    amp.close()


def test_two_losses_through_shared_parameters_add_up_at_one_scale() -> None:
    batch, other = data(), data(seed=2)
    exact = mlp()
    (loss_of(exact, batch) + 100 * loss_of(exact, other)).backward()
    amp, model, optimizer = ready(Plan(compute="fp16", loss_scale=LossScale(init=256.0)))
    amp.scaler._losses.get("second").scale.fill_(32.0)  # the scales of the two losses now differ
    amp.backward(loss_of(model, batch), "loss")
    amp.backward(100 * loss_of(model, other), "second")
    amp.backward(0 * loss_of(model, other), "loss")
    amp.unscale_(optimizer)
    for a, b in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0.02, atol=0.02 * float(b.grad.abs().max()))
    assert not amp.step(optimizer).skipped


def test_only_the_loss_that_overflowed_backs_off() -> None:
    amp, model, optimizer = ready(FP16)
    batch = data()
    amp.backward(loss_of(model, batch), "sound")
    amp.backward(loss_of(model, batch) * float("inf"), "broken")
    assert amp.step(optimizer).skipped
    optimizer.zero_grad()
    assert (amp.get_scale("sound"), amp.get_scale("broken")) == (1024.0, 512.0)


def test_plain_scale_refuses_to_mix_losses() -> None:
    amp, model, _ = ready(FP16)
    amp.scale(loss_of(model, data()), "a").backward()
    with pytest.raises(StateError, match=r"'a' was scaled in this window.*amp.backward"):
        amp.scale(loss_of(model, data()), "b")


def test_the_window_rule() -> None:
    """step(a) and step(b) share one window; each skips by its own gradients, and the scale changes once, at the next
    window.
    """
    amp = castwise.Amp(FP16, device=DEVICE)
    model_a, model_b = mlp(0), mlp(1)
    a, b = torch.optim.SGD(model_a.parameters(), 0.1), torch.optim.SGD(model_b.parameters(), 0.1)
    amp.prepare(model_a, a)
    amp.prepare(model_b, b)
    amp.backward(loss_of(model_a, data()))
    amp.backward(loss_of(model_b, data()) * float("inf"))
    assert not amp.step(a).skipped
    assert float(amp.scaler._scale) == 1024.0
    assert amp.step(b).skipped
    assert float(amp.scaler._scale) == 1024.0
    amp.backward(loss_of(model_a, data()))
    assert float(amp.scaler._scale) == 512.0


def test_joint_step_decides_for_both() -> None:
    amp = castwise.Amp(FP16, device=DEVICE)
    model_a, model_b = mlp(0), mlp(1)
    a, b = torch.optim.SGD(model_a.parameters(), 0.1), torch.optim.SGD(model_b.parameters(), 0.1)
    amp.prepare(model_a, a)
    amp.prepare(model_b, b)
    before = model_a[0].weight.detach().clone()
    amp.backward(loss_of(model_a, data()))
    amp.backward(loss_of(model_b, data()) * float("inf"))
    result = amp.step(a, b, max_norm=1.0)
    assert result.skipped
    assert torch.equal(model_a[0].weight, before)


def test_a_scheduler_can_be_gated_by_the_result() -> None:
    amp, model, optimizer = ready(FP16)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number in range(4):
        factor = float("inf") if number == 1 else 1.0
        amp.backward(loss_of(model, data()) * factor)
        if not amp.step(optimizer).skipped:
            scheduler.step()
        optimizer.zero_grad()
    assert scheduler.get_last_lr() == [0.1 * 0.5**3]


# --- clipping -----------------------------------------------------------------------------------------------


SMALL = LossScale(init=1.0)  # a larger scale would overflow, and the step would be skipped instead of clipped


@each_value()
@pytest.mark.parametrize(
    "plan",
    [
        "fp32", "bf16-mixed", "bf16-master", "bf16-true",
        Plan(compute="fp16", loss_scale=SMALL), Plan(compute="fp16", params="compute", loss_scale=SMALL),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["step", "optimizer", "params", "user"])
def test_every_way_to_clip_clips_what_is_applied(plan: Any, how: str) -> None:
    amp, model, optimizer = ready(plan)
    optimizer.param_groups[0]["momentum"] = 0.0
    start = {k: v.clone() for k, v in amp.model_state_dict(model).items()}
    amp.backward(1000 * loss_of(model, data()))
    if how == "optimizer":
        norm = amp.clip_grad_norm_(optimizer, 0.5)
    elif how == "params":
        norm = amp.clip_grad_norm_(model.parameters(), 0.5)
    elif how == "user":
        amp.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    result = amp.step(optimizer, max_norm=0.5 if how == "step" else None)
    norm = result.grad_norm if how == "step" else norm
    assert float(norm) > 100
    moved = torch.sqrt(sum((v - start[k]).pow(2).sum() for k, v in amp.model_state_dict(model).items()))
    assert float(moved) == pytest.approx(0.1 * 0.5, rel=0.02)
    amp.close()


def test_what_became_infinite_after_unscaling_is_seen_by_clipping() -> None:
    amp, model, optimizer = ready(FP16)
    amp.backward(loss_of(model, data()))
    amp.scaler.unscale_(optimizer)  # bypasses the session
    next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
    assert amp.step(optimizer, max_norm=1.0).skipped
    amp.close()


def test_clip_by_value() -> None:
    amp, model, optimizer = ready(Plan(compute="fp16", loss_scale=SMALL))
    amp.backward(1000 * loss_of(model, data()))
    amp.clip_grad_value_(optimizer, 0.25)
    assert max(float(p.grad.abs().max()) for p in model.parameters()) == 0.25


# --- closures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", FP16, "bf16-master", "fp16-master"])
def test_lbfgs(plan: Any) -> None:
    model, batch = mlp(), data()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=5)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        amp.backward(loss)
        losses.append(float(loss.detach()))
        return loss

    for _ in range(3):
        assert not amp.step(optimizer, closure=closure).skipped
    assert losses[-1] < 0.5 * losses[0]
    amp.close()


@pytest.mark.parametrize("plan", [FP16, "fp16-master"])
def test_a_non_finite_evaluation_takes_the_step_back(plan: Any) -> None:
    model, batch = mlp(), data()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=5)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        calls.append(1)
        loss = loss_of(model, batch) * (float("inf") if len(calls) == 3 else 1.0)
        amp.backward(loss)
        return loss

    before = {k: v.clone() for k, v in amp.model_state_dict(model).items()}
    stored = {k: v.clone() for k, v in model.state_dict().items()}
    scale = amp.get_scale()
    assert amp.step(optimizer, closure=closure).skipped
    assert all(torch.equal(v, before[k]) for k, v in amp.model_state_dict(model).items())
    assert all(torch.equal(v, stored[k]) for k, v in model.state_dict().items())
    assert amp.get_scale() == scale / 2
    assert not amp.step(optimizer, closure=closure).skipped


# --- with other parts of torch ------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_overrides(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
            self.checkpoint = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def piece(x: torch.Tensor) -> torch.Tensor:
                return torch.exp(self.first(x))

            return self.last(checkpoint(piece, x, use_reentrant=reentrant) if self.checkpoint else piece(x))

    grads = []
    for use in (True, False):
        torch.manual_seed(0)
        model = Model()
        model.checkpoint = use
        amp, model, _ = ready(Plan(compute="bf16", ops={"exp": "fp32"}), model=model)
        x, y = data()
        loss = nn.functional.mse_loss(model(x.requires_grad_()), y)
        amp.backward(loss)
        grads.append([p.grad.clone() for p in model.parameters()])
        amp.close()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_ambient_region_covers_code_outside_the_model() -> None:
    amp, model, optimizer = ready(Plan(compute="bf16", ops={"exp": "fp32"}))
    x, y = data()
    for _ in range(2):
        with amp.autocast():
            out = model(x)
            loss = torch.exp(nn.functional.linear(out, y)).mean()
            assert loss.dtype is torch.float32
        amp.backward(loss)
        amp.step(optimizer)
    with amp.autocast(enabled=False):
        assert (x @ x.t()).dtype is torch.float32


def test_a_step_inside_an_ambient_region_is_seen_by_the_next_forward() -> None:
    amp, model, optimizer = ready("bf16-mixed", rate=10.0)
    x, y = data()
    with amp.autocast():
        first = nn.functional.linear(x, model[0].weight)
        amp.backward(loss_of(model, (x, y)))
        amp.step(optimizer)
        second = nn.functional.linear(x, model[0].weight)
    assert not torch.equal(first, second)


class Encoder(nn.Module):
    """A model with a second entry point."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.inside = self.linear(x)
        return self.inside.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def test_methods_other_than_forward() -> None:
    model = Encoder()
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    amp.prepare(model, methods=("encode",))
    assert model.encode(data()[0]).dtype is torch.float32
    assert model.inside.dtype is torch.bfloat16
    assert inspect.signature(model.encode) == inspect.signature(Encoder().encode)
    assert model.encode.__wrapped__.__func__ is Encoder.encode  # set by functools.wraps
    model.inside = None
    twin = copy.deepcopy(model)
    twin.encode(data()[0])
    assert twin.inside.dtype is torch.bfloat16
    plain = pickle.loads(pickle.dumps(model))
    plain.encode(data()[0])
    assert plain.inside.dtype is torch.float32
    with pytest.raises(StateError, match="no method of that name; it has encode"):
        castwise.Amp("bf16-mixed", device=DEVICE).prepare(Encoder(), methods=("decode",))
    amp.close()
    assert "encode" not in vars(model)


def test_inference_casts_weights_once() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 2)
    ).eval()
    x = torch.randn(2, 3, 2, 2)
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    assert amp.prepare(copy.deepcopy(model))(x).dtype is torch.float32
    want = castwise.Amp("bf16-mixed", device=DEVICE).prepare(copy.deepcopy(model))(x)
    amp.prepare(model, inference=True)
    assert model[0].weight.dtype is model[4].weight.dtype is torch.bfloat16
    assert model[1].weight.dtype is model[3].weight.dtype is torch.float32
    with torch.inference_mode():
        assert torch.equal(model(x), want)
    with pytest.raises(StateError, match="takes no optimizer"):
        castwise.Amp("bf16-mixed", device=DEVICE).prepare(
            mlp(), torch.optim.SGD(mlp().parameters(), 1), inference=True
        )


def test_copies_of_prepared_models_run_by_the_plan() -> None:
    for plan in (
        "bf16-mixed",
        "bf16-master",
        "O1",
        Plan(compute="bf16", regions={"0": "fp32"}, ops={"tanh": "fp32"}),
    ):
        amp, model, _ = ready(plan)
        x, _ = data()
        assert torch.equal(copy.deepcopy(model)(x), model(x))
        amp.close()
    gc.collect()
    assert not kernels.registered(DEVICE)


@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "bf16-master", "bf16-true"])
def test_kernels_of_every_shape_are_laid_out_as_torch_lays_them_out(name: str) -> None:
    """For 1 x 1 kernels and single channels, ``contiguous`` reports channels_last and leaves the strides unchanged."""
    model = nn.Sequential(
        nn.Conv2d(4, 8, 1), nn.Conv2d(8, 1, 1), nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 1, groups=2)
    )
    before = [p.stride() for p in model.parameters()]
    want = [p.stride() for p in copy.deepcopy(model).to(memory_format=torch.channels_last).parameters()]
    amp = castwise.Amp(f"{name}+memory_format=channels_last", device=DEVICE)
    amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert [p.stride() for p in model.parameters()] == want
    seen: list[tuple[int, ...]] = []
    model[0].register_forward_hook(lambda _module, _args, out: seen.append(out.stride()))
    model(torch.randn(2, 4, 5, 5))
    assert seen == [(200, 1, 40, 8)]
    amp.close()
    assert [p.stride() for p in model.parameters()] == before


def test_memory_format_and_fused_optimizer_of_a_plan() -> None:
    plan = Plan(compute="bf16", params="compute", memory_format="channels_last", optimizer="fused")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(4))
    model(torch.zeros(1, 3, 5, 5))
    plain = copy.deepcopy(model)
    x, y = torch.randn(4, 3, 5, 5), torch.randn(4, 4)
    optimizers = []
    for run in (model, plain):
        optimizer = torch.optim.AdamW(run.parameters(), 0.01)
        nn.functional.mse_loss(run(x), y).backward()
        optimizer.step()  # creates state with contiguous strides before the plan changes them
        optimizer.zero_grad()
        optimizers.append(optimizer)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizers[0])
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert optimizers[0].param_groups[0]["fused"]
    for _ in range(3):
        amp.backward(nn.functional.mse_loss(model(x), y))
        amp.step(optimizers[0])
        optimizers[0].zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for key, value in amp.model_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=0, atol=0.01)
    with pytest.raises(DeviceError, match="LBFGS has no fused kernel"):
        castwise.Amp(plan, device=DEVICE).prepare((other := mlp()), torch.optim.LBFGS(other.parameters()))


# --- state --------------------------------------------------------------------------------------------------


def test_close_leaves_everything_as_it_was() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    params = list(model.parameters())
    before = torch.backends.mkldnn.matmul.fp32_precision
    plan = Plan(
        compute="bf16", params="compute", ops={"tanh": "fp32"}, fp32_matmul="ieee", regions={"2": "fp32"}
    )
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer, methods=("extra_repr",))
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        amp.backward(loss_of(model, data()))
        amp.step(optimizer)
        weights = {k: v.clone() for k, v in amp.model_state_dict(model).items()}
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert not kernels.registered(DEVICE)
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert optimizer.param_groups[0]["params"] == params
    optimizer.zero_grad()
    loss_of(model, data()).backward()
    optimizer.step()


def test_close_leaves_what_prepare_did_not_store() -> None:
    model = nn.Conv2d(2, 2, 3)
    amp, *_ = ready("bf16-mixed", model=model)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    amp.close()
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.cpu  # bf16 inside fp32 products exists only on CPUs
@pytest.mark.skipif(
    not castwise.core._torch.cpu.cpu_has_bf16(), reason="this CPU has no second precision for fp32 products"
)
def test_live_plans_that_disagree_on_process_settings() -> None:
    first = castwise.Amp(Plan(compute="fp32", fp32_matmul="ieee"), device=DEVICE)
    first.prepare(mlp())
    with pytest.raises(StateError, match=r"fp32_matmul='bf16'.*needs 'ieee'"):
        castwise.Amp(Plan(compute="fp32", fp32_matmul="bf16"), device=DEVICE).prepare(mlp())
    first.close()
    second = castwise.Amp(Plan(compute="fp32", fp32_matmul="bf16"), device=DEVICE)
    second.prepare(mlp())
    second.close()


def test_scale_moves_between_plans() -> None:
    amp, model, optimizer = ready(FP16)
    amp.backward(loss_of(model, data()) * float("inf"))
    amp.step(optimizer)
    state = amp.state_dict()
    other, _, _ = ready("fp16-master")
    other.load_state_dict(state)
    assert other.get_scale() == 512.0
    plain, _, _ = ready("bf16-mixed")
    plain.load_state_dict(state)
    other.load_state_dict(plain.state_dict())
    assert other.get_scale() == 512.0
    with pytest.raises(CheckpointError, match="expected the keys version"):
        other.load_state_dict({"scale": 3})


def test_switching_plans_midway_keeps_optimizer_state() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for plan in ("fp32", "bf16-master", "fp16-mixed", "bf16-mixed", "fp16-master"):
        with castwise.Amp(plan, device=DEVICE) as amp:
            amp.prepare(model, optimizer)
            for _ in range(2):
                amp.backward(loss_of(model, data()))
                amp.step(optimizer)
                optimizer.zero_grad()
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps <= {8, 9, 10}  # ten, minus steps skipped at the start under fp16: no count restarts
    assert len(optimizer.state) == 4
    assert all(state["exp_avg"].dtype is torch.float32 for state in optimizer.state.values())


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: castwise.Amp("bf17"), PlanError, "bf17"),
        (
            lambda: castwise.Amp("bf16-mixed", device="cuda:9" if not torch.cuda.is_available() else "xpu"),
            DeviceError,
            "no",
        ),
        (
            lambda: castwise.Amp("bf16-mixed", device="meta"),
            DeviceError,
            "not a device type that torch.autocast accepts; allowed: cpu",
        ),
        (lambda: ready(Plan(compute="bf16", ops={"expp": "fp32"})), PlanError, "expp"),
        (lambda: ready(Plan(compute="bf16", regions={"nothing": "fp32"})), PatternError, "nothing"),
        (
            lambda: ready("bf16-mixed", model=mlp().half()),
            PlanError,
            "0.weight, 0.bias.*stored in fp16.*'bf16-master'",
        ),
        (lambda: ready("fp16-mixed", model=mlp().half()), PlanError, "'fp16-master'"),
        (
            lambda: castwise.Amp("bf16-mixed", device=DEVICE).prepare(nn.DataParallel(mlp())),
            StateError,
            "wrap it after",
        ),
        (lambda: castwise.Amp("bf16-mixed", device=DEVICE).prepare("model"), StateError, "not an nn.Module"),
        (
            lambda: castwise.Amp("bf16-mixed", device=DEVICE).prepare(mlp(), mlp()),
            StateError,
            "not a torch.optim.Optimizer",
        ),
        (lambda: castwise.Amp("bf16-mixed", device=DEVICE).step(), StateError, "needs an optimizer"),
    ],
)
def test_mistakes_are_refused_in_words(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_preparing_twice_is_refused() -> None:
    amp, model, optimizer = ready("bf16-mixed")
    with pytest.raises(StateError, match="already prepared, by this Amp; close"):
        amp.prepare(model)
    with pytest.raises(StateError, match=r"already prepared, by Amp\('bf16-mixed'"):
        castwise.Amp("fp32", device=DEVICE).prepare(model)
    with pytest.raises(StateError, match="this SGD holds no parameter of this Sequential"):
        amp.prepare(mlp(), optimizer)
    amp.close()
    castwise.Amp("fp32", device=DEVICE).prepare(model)


def test_a_session_that_was_dropped_can_be_found() -> None:
    model = mlp()
    castwise.Amp("bf16-mixed", device=DEVICE).prepare(model)
    gc.collect()
    with pytest.raises(StateError, match=r"castwise\.Amp\.of"):
        castwise.Amp("fp32", device=DEVICE).prepare(model)
    castwise.Amp.of(model).close()
    assert castwise.Amp.of(model) is None
    castwise.Amp("fp32", device=DEVICE).prepare(model)


def test_a_copy_of_a_prepared_model_can_get_a_plan_of_its_own() -> None:
    amp, model, _ = ready(Plan(compute="bf16", regions={"0": "fp32"}, ops={"tanh": "fp32"}))
    twin = copy.deepcopy(model)
    other = castwise.Amp("fp32", device=DEVICE)
    other.prepare(twin)
    x, _ = data()
    assert torch.equal(twin(x), mlp()(x))
    assert sum(len(m._forward_hooks) for m in twin.modules()) == 1
    amp.close()
    gc.collect()
    assert not kernels.registered(DEVICE)


def test_a_failed_prepare_changes_nothing() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp = castwise.Amp(Plan(compute="bf16", params="compute", regions={"nothing": "fp32"}), device=DEVICE)
    with pytest.raises(PatternError):
        amp.prepare(model, optimizer)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert not model._forward_hooks
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_a_module_that_ran_compiled_is_refused() -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    model = torch.compile(Local(), backend="aot_eager")
    castwise.Amp("bf16-mixed", device=DEVICE).prepare(torch.compile(Local(), backend="aot_eager"))
    model(data()[0])
    with pytest.raises(StateError, match="already run compiled"):
        castwise.Amp("bf16-mixed", device=DEVICE).prepare(model)


@each_value()
@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-mixed+ops.tanh=fp32", "bf16-master", "bf16-true"])
@pytest.mark.parametrize("inside", ["model", "part"])
def test_a_function_that_ran_compiled_around_a_model_is_compiled_anew(plan: str, inside: str) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    own = Own()
    model = own if inside == "model" else nn.Sequential(own, nn.Linear(8, 8))
    x = torch.randn(4, 8)
    compiled = torch.compile(lambda z: model(z), backend="aot_eager")
    compiled(x)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(2):
            assert torch.equal(compiled(x), model(x))
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_formulas_keep_their_formats_where_backward_is_called_inside_of_autocast(way: str) -> None:
    def gradients(inside: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        amp = castwise.Amp("bf16-mixed+regions.2=fp32", device=DEVICE)
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        loss = model(torch.randn(12, 6)).square().mean()
        with amp.autocast() if inside else contextlib.nullcontext():
            if way == "grad":
                return list(amp.grad(loss, list(model.parameters())))
            amp.backward(loss)
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients(inside=True), gradients(inside=False)))


def test_a_loss_that_is_not_a_scalar() -> None:
    amp, model, _ = ready("bf16-mixed")
    with pytest.raises(PlanError, match=r"shape \[12, 4\]; a scalar is needed"):
        amp.backward(model(data()[0]))
    with pytest.raises(PlanError, match=r"the loss is a float; .*Leave \.item\(\) out"):
        amp.backward(loss_of(model, data()).item())


def test_fsdp_policy() -> None:
    pytest.importorskip("torch.distributed.fsdp", reason="this torch has no FSDP2")
    assert castwise.Amp("bf16-mixed", device=DEVICE).mp_policy().param_dtype is None
    policy = castwise.Amp("bf16-master", device=DEVICE).mp_policy()
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    amp = castwise.Amp(
        Plan(compute="bf16", params="compute", regions=[Region("type:LayerNorm", compute="fp32")]),
        device=DEVICE,
    )
    assert amp.mp_policy(nn.LayerNorm(3)).param_dtype is None
