"""Buffers after a skipped step, compared with copies made by hand."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import castwise
from castwise.core.plans.plan import PRESETS
from castwise.core.scaler import Buffers
from castwise.errors import NonFiniteError
from tests.here import DEVICE
from tests.soak import each_value

INF, NAN = float("inf"), float("nan")


def batch(bad: float | None = None, shape: tuple[int, ...] = (12, 4), seed: int = 1) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed))
    if bad is not None:
        x.view(-1)[0] = bad
    return x


def norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def held(model: nn.Module) -> dict[str, Tensor]:
    """Copy the floating buffers."""
    floating = ((n, b) for n, b in model.named_buffers() if b.is_floating_point() or b.is_complex())
    return {name: buffer.detach().clone() for name, buffer in floating}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def numbers(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.itemsize == 1 else tensor

    return a.keys() == b.keys() and all(
        a[n].dtype is b[n].dtype and torch.equal(numbers(a[n]).nan_to_num(7e7), numbers(b[n]).nan_to_num(7e7))
        for n in a
    )


class Run:
    """A model in training under a plan."""

    def __init__(
        self, plan: Any = "fp32", model: nn.Module | None = None, lr: float = 0.01, **options: Any
    ) -> None:
        self.model = norm() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr)
        plan = "fp16-mixed+loss_scale.init=256" if plan == "fp16-mixed" else plan  # no accidental overflow
        self.amp = castwise.Amp(plan, device=DEVICE, **options)
        self.amp.prepare(self.model, self.optimizer)

    def backward(self, x: Tensor, factor: float = 1.0) -> None:
        self.amp.backward(self.model(x).square().mean() * factor)

    def step(self, *xs: Tensor, factor: float = 1.0, **how: Any) -> castwise.StepResult:
        self.optimizer.zero_grad()
        for x in xs:
            self.backward(x, factor)
        return self.amp.step(self.optimizer, **how)


# --- a skipped step, in every way of stepping ----------------------------------------------------------------


def _plainly(run: Run) -> None:
    run.amp.step(run.optimizer)


def _clipped(run: Run) -> None:
    run.amp.step(run.optimizer, max_norm=1.0)


def _clipped_by_hand(run: Run) -> None:
    run.amp.clip_grad_norm_(run.optimizer, 1.0)
    run.amp.step(run.optimizer)


def _by_itself(run: Run) -> None:
    run.amp.unscale_(run.optimizer)
    run.optimizer.step()


def _given_up(run: Run) -> None:
    """Skip as user code does that checks gradients after unscaling and does not step."""
    run.amp.unscale_(run.optimizer)
    run.optimizer.zero_grad()
    run.model.eval()
    run.backward(batch(seed=9))
    run.model.train()


STEPS = {f.__name__.strip("_"): f for f in (_plainly, _clipped, _clipped_by_hand, _by_itself, _given_up)}


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("plan", sorted(set(PRESETS) - {"tf32"}))
@each_value()
def test_a_skipped_step_puts_back_what_it_poisoned(plan: str, how: str) -> None:
    run = Run(plan)
    for seed in range(2):
        run.step(batch(seed=seed))
    good = held(run.model)
    run.optimizer.zero_grad()
    run.backward(batch(NAN))
    assert not held(run.model)["1.running_mean"].isfinite().all()
    STEPS[how](run)
    assert same(held(run.model), good)
    assert run.amp.restored_buffers == {"1.running_mean": 1, "1.running_var": 1}
    run.optimizer.zero_grad()
    run.step(batch(seed=5))
    assert not same(held(run.model), good)
    assert all(buffer.isfinite().all() for buffer in held(run.model).values())


@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed+loss_scale.init=8", "bf16-master"])
@pytest.mark.parametrize("then", ["cleared", "evaluated", "trained"])
def test_a_batch_that_a_rule_left_out_is_forgotten_before_anybody_looks(plan: str, then: str) -> None:
    """A user's check skips the last batch before an evaluation or a checkpoint, or one between two others."""
    run = Run(plan)
    run.step(batch(seed=0))
    good = held(run.model)
    run.optimizer.zero_grad()
    run.backward(batch(NAN))
    assert not run.amp.clip_grad_norm_(run.optimizer, 1.0).isfinite()
    if then == "cleared":
        run.optimizer.zero_grad()
        assert same(held(run.model), good)
    if then == "evaluated":
        with torch.no_grad():
            assert run.model.eval()(batch(seed=3)).isfinite().all()
        assert same(held(run.model.train()), good)
    run.model(batch(seed=2))
    learned = held(run.model)
    assert not same(learned, good)
    assert all(buffer.isfinite().all() for buffer in learned.values())
    run.optimizer.zero_grad()
    run.backward(batch(seed=2))
    assert not run.amp.step(run.optimizer).skipped
    assert run.amp.restored_buffers == {"1.running_mean": 1, "1.running_var": 1}
    assert run.amp.skipped_steps == 1


@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed", "bf16-master"])
@pytest.mark.parametrize("then", ["evaluated", "saved", "trained"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_batch_whose_loss_a_rule_passes_over_is_forgotten(plan: str, then: str, bad: float) -> None:
    """The loop skips the batch before backward: ``if not loss.isfinite(): continue``."""
    run = Run(plan)
    run.step(batch(seed=0))
    good = held(run.model)
    assert not run.model(batch(bad)).isfinite().all()
    if then == "evaluated":
        with torch.no_grad():
            assert run.model.eval()(batch(seed=3)).isfinite().all()
        run.model.train()
    if then == "saved":
        assert all(value.isfinite().all() for value in run.model.state_dict().values())
    if then != "trained":
        assert same(held(run.model), good)
    assert not run.step(batch(seed=2)).skipped
    by_hand = Run(plan)
    by_hand.step(batch(seed=0))
    by_hand.step(batch(seed=2))
    assert same(held(run.model), held(by_hand.model))
    assert set(run.amp.restored_buffers) == {"1.running_mean", "1.running_var"}
    assert run.amp.skipped_steps == 0


def test_an_infinity_that_a_forward_leaves_is_not_taken_for_a_batch_that_was_passed_over() -> None:
    run = Run("fp32", Lists())
    run.model.fill = -INF
    run.model(batch())
    run.model(batch())
    assert (run.model.seen == -INF).all()


class Lists(nn.Module):
    """Fills a buffer with non-finite values on purpose."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.fill = 0.0
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.fill_(self.fill)
        return self.linear(x)  # type: ignore[no-any-return]


def test_it_is_named_and_counted() -> None:
    run = Run("bf16-mixed")
    assert run.step(batch()).restored == ()
    assert run.amp.restored_buffers == {}
    assert "put back" not in run.amp.summary()
    for _ in range(2):
        assert run.step(batch(NAN)).restored == ("1.running_mean", "1.running_var")
    assert run.amp.restored_buffers == {"1.running_mean": 2, "1.running_var": 2}
    said = "buffers restored after skipped steps had made them non-finite: 1.running_mean (2 times), 1.running_var (2 times)"
    assert run.amp.summary().endswith(f"skipped steps: 2\n{said}")


def test_an_overflow_of_fp16_from_sound_data() -> None:
    model = norm()
    with torch.no_grad():
        model[0].weight.mul_(3e4)
    run = Run("fp16-mixed", model)
    good = held(model)
    assert run.step(10 * batch()).skipped
    assert same(held(model), good)


@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed"])
def test_where_nothing_became_non_finite_buffers_are_those_of_a_loop_by_hand(plan: str) -> None:
    run, hand = Run(plan, lr=0.0), norm()
    for seed, overflows in enumerate((False, True, True, False)):
        result = run.step(batch(seed=seed), factor=INF if overflows else 1.0)
        assert (result.skipped, result.restored) == (overflows, ())
        with torch.autocast(DEVICE, torch.float16, enabled=plan == "fp16-mixed"):
            hand(batch(seed=seed))
    assert same(held(run.model), held(hand))
    assert run.model[1].num_batches_tracked == 4


def test_each_buffer_is_put_back_whole_and_by_itself() -> None:
    run = Run(model=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    run.step(batch())
    before = held(run.model)
    x = batch(seed=3)
    x[0, 1] = 1e30  # its mean is finite, its variance is not
    assert run.step(x, factor=INF).restored == ("0.running_var",)
    now = held(run.model)
    assert torch.equal(now["0.running_var"], before["0.running_var"])
    assert now["0.running_mean"].isfinite().all()
    assert (now["0.running_mean"] != before["0.running_mean"]).all()
    assert run.model[0].num_batches_tracked == 2


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed"])
def test_nonfinite_allow_touches_nothing(plan: str) -> None:
    run = Run(plan, nonfinite="allow")
    run.step(batch(NAN))
    assert held(run.model)["1.running_mean"].isnan().any()
    assert run.amp.restored_buffers == {}


@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed+loss_scale.dynamic=false"])
def test_a_step_that_is_an_error_puts_them_back_too(plan: str) -> None:
    run = Run(plan, nonfinite="raise")
    run.step(batch())
    good = held(run.model)
    with pytest.raises(castwise.errors.CastwiseError):
        run.step(batch(NAN))
    assert same(held(run.model), good)


def test_a_step_that_is_made_leaves_them_and_the_next_skipped_one_too() -> None:
    run = Run(model=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    x = batch()
    x[0, 1] = 1e30  # divided by an infinite standard deviation, the loss is finite
    assert not run.step(x).skipped
    assert held(run.model)["0.running_var"].isinf().any()
    assert run.step(batch(), factor=INF).restored == ()
    assert held(run.model)["0.running_var"].isinf().any()


# --- all ways to write buffers --------------------------------------------------------------------------------


class Writes(nn.Module):
    """A linear layer, and a buffer that a function updates from the batch."""

    mean: Tensor

    def __init__(self, start: Tensor, write: Callable[[Any, Tensor], None], persistent: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 2)
        self.write = write
        self.register_buffer("mean", start, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x.detach().float())
        return self.linear(x)


def _in_place(self: Any, x: Tensor) -> None:
    self.mean.mul_(0.9).add_(x.mean().to(self.mean.dtype))


def _through_data(self: Any, x: Tensor) -> None:
    self.mean.data.mul_(0.9).add_(x.mean())


def _by_assignment(self: Any, x: Tensor) -> None:
    self.mean = self.mean * 0.9 + x.mean()


def _with_a_graph(self: Any, x: Tensor) -> None:
    self.mean = self.mean.detach() * 0.9 + self.linear.bias.sum() + x.mean()


def _by_numpy(self: Any, x: Tensor) -> None:
    array = self.mean.numpy()
    array *= 0.9
    array += x.mean().item()


def _cast(self: Any, x: Tensor) -> None:
    self.mean.copy_((self.mean.float() * 0.9 + x.mean()).to(self.mean.dtype))


def _grows(self: Any, x: Tensor) -> None:
    self.mean = torch.cat([self.mean, x.mean()[None]])


def _widens(self: Any, x: Tensor) -> None:
    self.mean = self.mean.double() * 0.9 + x.mean()


def _parametrized() -> nn.Module:
    model = Writes(torch.zeros(3), lambda self, x: self.parametrizations.mean.original.add_(x.mean()))
    parametrize.register_parametrization(model, "mean", nn.Identity())
    return model


def _shared() -> nn.Module:
    model = Writes(torch.zeros(3), _in_place)
    model.linear.register_buffer("again", model.mean)
    return model


def _conv(of: int, kind: Any) -> nn.Module:
    torch.manual_seed(0)
    unflatten = nn.Unflatten(1, (2, 2, *[1] * (of - 2), 1)[:of]) if of > 1 else nn.Identity()
    return nn.Sequential(unflatten, kind(2 if of > 1 else 4), nn.Flatten(), nn.Linear(4, 2))


class Instance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.unflatten(1, (2, 2))).flatten(1))


class Codebook(nn.Module):
    """Vector quantisation with running averages, as libraries implement it."""

    size: Tensor
    sums: Tensor
    codes: Tensor

    def __init__(self, codes: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("sums", torch.randn(codes, 4))
        self.register_buffer("codes", self.sums.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x).float()
        nearest = nn.functional.one_hot(torch.cdist(z, self.codes).argmin(1), len(self.size)).float()
        if self.training:
            self.size.data.lerp_(nearest.sum(0), 0.1)
            self.sums.data.lerp_(nearest.T @ z.detach(), 0.1)
            self.codes.data.copy_(self.sums / (self.size[:, None] + 1e-5))
        return self.outer(z + (nearest @ self.codes - z).detach())


MAKES: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": norm,
    "BatchNorm2d": lambda: _conv(3, nn.BatchNorm2d),
    "BatchNorm3d": lambda: _conv(4, nn.BatchNorm3d),
    "cumulative": lambda: _conv(1, lambda n: nn.BatchNorm1d(n, momentum=None)),
    "InstanceNorm": Instance,
    "codebook": Codebook,
    "large codebook": lambda: Codebook(8192),
    "average": lambda: Writes(torch.zeros(3), _in_place),
    "through .data": lambda: Writes(torch.zeros(3), _through_data),
    "by assignment": lambda: Writes(torch.zeros(3), _by_assignment),
    "with a graph": lambda: Writes(torch.zeros(3), _with_a_graph),
    **({"by numpy": lambda: Writes(torch.zeros(3), _by_numpy)} if DEVICE == "cpu" else {}),
    "another shape": lambda: Writes(torch.zeros(3), _grows),
    "0-dim": lambda: Writes(torch.zeros(()), _in_place),
    "several dimensions": lambda: Writes(torch.zeros(2, 3, 4).transpose(0, 2), _in_place),
    "not saved": lambda: Writes(torch.zeros(3), _in_place, persistent=False),
    "large": lambda: Writes(torch.zeros(200, 200), _in_place),
    "large, through .data": lambda: Writes(torch.zeros(200, 200), _through_data),
    "complex": lambda: Writes(torch.zeros(3, dtype=torch.complex64), _in_place),
    "fp64": lambda: Writes(torch.zeros(3, dtype=torch.float64), _in_place),
    "bf16": lambda: Writes(torch.zeros(3, dtype=torch.bfloat16), _in_place),
    "fp16": lambda: Writes(torch.zeros(3, dtype=torch.float16), _in_place),
    "fp8": lambda: Writes(torch.zeros(3).to(torch.float8_e5m2), _cast),
    "fp8 without infinity": lambda: Writes(torch.zeros(3).to(torch.float8_e4m3fn), _cast),
    "starts infinite": lambda: Writes(torch.tensor([INF, 0.0]), lambda self, x: self.mean.add_(x.mean())),
    "shared": _shared,
    "parametrized": _parametrized,
    "a parameter's": lambda: nn.Sequential(norm(), parametrizations.weight_norm(nn.Linear(2, 2))),
}


@pytest.mark.parametrize("decides", ["host", "device"])
@pytest.mark.parametrize("make", MAKES)
def test_whatever_writes_it(make: str, decides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(model=MAKES[make]())
    # As with a fused optimizer on an accelerator, where only the device has the overflow flag.
    if decides == "device":
        whole = Buffers.put_back
        monkeypatch.setattr(Buffers, "put_back", lambda self, flag=None: whole(self, torch.ones(())))
    for count in (3, 1):
        for seed in range(count):
            run.step(batch(seed=seed))
        good, before = held(run.model), [*run.model.buffers()]
        result = run.step(batch(NAN))
        assert result.skipped
        now = held(run.model)
        if "codebook" in make:  # the count of uses per code stays finite
            assert good.pop("size").shape == now.pop("size").shape
        assert same(now, good)
        assert set(result.restored) == set(run.amp.restored_buffers)
        assert result.restored
        if make not in ("by assignment", "with a graph", "another shape"):
            assert all(a is b for a, b in zip(before, run.model.buffers(), strict=True))
    assert set(run.amp.restored_buffers.values()) == {2}


def test_a_flag_on_the_device_that_is_not_set_changes_nothing() -> None:
    model = nn.ModuleList([norm(), Codebook()])
    buffers = Buffers()
    kept = buffers.follow(model)
    kept.begin(True)
    model[0](batch(NAN))
    model[1](batch())
    now, versions = held(model), [b._version for b in model.buffers()]
    buffers.put_back(torch.zeros(()))
    assert same(held(model), now)
    assert [b._version for b in model.buffers()] == versions
    assert buffers.restored == {}
    buffers.put_back(torch.ones(()))
    assert buffers.restored == {"0.1.running_mean": 1, "0.1.running_var": 1}


def test_infinities_that_are_meant_stay() -> None:
    def masks(self: Any, x: Tensor) -> None:
        self.mean = torch.full((3,), -INF).masked_fill(x[:3, 0] > 0, 0.0)

    model = Writes(torch.full((3,), -INF), masks)
    model.register_buffer("causal", torch.full((200, 200), -INF).triu(1))
    model.register_buffer("best", torch.tensor(INF))
    run = Run(model=model)
    for seed in range(6):
        x = batch(seed=seed)
        x[:3, 0] = -1.0
        result = run.step(x, factor=INF if seed % 2 else 1.0)
        assert (result.skipped, result.restored) == (bool(seed % 2), ())
    assert model.best == INF
    assert model.causal[0, 1] == -INF


def test_buffers_and_modules_that_come_later() -> None:
    def grow(self: Any, x: Tensor) -> None:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(2))
        self.late.add_(x.mean())

    run = Run(model=Writes(torch.zeros(1), grow))
    run.step(batch())
    run.model.register_module("norm", nn.BatchNorm1d(4))
    run.model.register_forward_pre_hook(lambda module, args: module.norm(*args) is None or None)
    run.step(batch(seed=2))
    good = held(run.model)
    assert set(run.step(batch(NAN)).restored) == {"late", "norm.running_mean", "norm.running_var"}
    assert same(held(run.model), good)
    run.model.norm = nn.BatchNorm1d(4)  # the norm is replaced and a buffer removed
    del run.model.late
    run.model.write = lambda self, x: None
    run.step(batch(seed=3))
    good = held(run.model)
    run.step(batch(NAN))
    assert same(held(run.model), good)


class Late(nn.Module):
    """A running mean created by the first forward."""

    mean: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().float().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return self.linear(x - self.mean)  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", ["fp32", "bf16-master", "fp16-mixed"])
def test_a_buffer_that_is_none_at_first(plan: str) -> None:
    run = Run(plan, Late())
    assert run.step(batch(NAN)).skipped
    assert run.model.mean is None
    assert run.amp.restored_buffers == {"mean": 1}
    assert not run.step(batch()).skipped
    good = held(run.model)
    assert run.step(batch(INF)).skipped
    assert same(held(run.model), good)
    assert run.amp.restored_buffers == {"mean": 2}


def test_a_lazy_norm_is_kept_when_it_has_its_shape() -> None:
    run = Run(model=nn.Sequential(nn.Linear(4, 3), nn.LazyBatchNorm1d(affine=False), nn.Linear(3, 2)))
    run.step(batch())
    good = held(run.model)
    run.step(batch(NAN))
    assert same(held(run.model), good)


# --- large buffers ------------------------------------------------------------------------------------------


def copied(run: Run) -> set[str]:
    """Return the names of the buffers that are currently copied."""
    return {name for one in run.amp._buffers._kept for group in one()._groups for name in group.names}


def test_large_buffers_are_copied_if_training_changes_them() -> None:
    model = Writes(torch.zeros(200, 200), _through_data)
    model.register_buffer("table", torch.zeros(200, 200))
    model.register_buffer("small", torch.zeros(3))
    run = Run(model=model)
    assert copied(run) == {"mean", "table", "small"}
    for seed in range(2):
        run.step(batch(seed=seed))
    assert copied(run) == {"mean", "small"}
    model.table.add_(1.0)  # version counters show it
    run.step(batch())
    assert copied(run) == {"mean", "table", "small"}


def test_a_large_buffer_that_begins_to_change_is_found_when_it_is_looked_at() -> None:
    model = Writes(torch.zeros(200, 200), lambda self, x: None)
    run = Run(model=model)
    for seed in range(5):
        run.step(batch(seed=seed))
    assert copied(run) == set()
    model.write = _through_data
    for seed in range(5):
        run.step(batch(seed=seed))
    assert copied(run) == {"mean"}
    good = held(model)
    run.step(batch(NAN))
    assert same(held(model), good)


def test_what_cannot_be_put_back_is_said_once() -> None:
    model = Writes(torch.zeros(200, 200), lambda self, x: None)
    run = Run(model=model)
    for seed in range(5):
        run.step(batch(seed=seed))
    model.write = _through_data
    with pytest.warns(
        RuntimeWarning, match="these buffers of Writes hold a NaN and cannot be restored: mean. No copy"
    ):
        run.step(batch(NAN))
    assert run.step(batch(NAN)).restored == ()


# --- several forwards in one window -------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [(NAN, None), (None, NAN), (None, INF, None)])
def test_several_forwards_in_a_window(bad: tuple[float | None, ...]) -> None:
    run = Run()
    run.step(batch())
    good = held(run.model)
    assert run.step(*(batch(one, seed=seed) for seed, one in enumerate(bad))).skipped
    assert same(held(run.model), good)
    run.step(batch(seed=2), batch(seed=3))
    assert not same(held(run.model), good)


def test_two_skipped_steps_in_a_row_keep_what_the_sound_one_learned() -> None:
    run = Run()
    run.step(batch())
    assert run.step(batch(seed=2), factor=INF).skipped
    good = held(run.model)
    assert run.step(batch(NAN)).skipped
    assert same(held(run.model), good)


def test_what_is_loaded_is_good() -> None:
    run, loaded = Run(), norm()
    loaded(batch(seed=7))
    run.step(batch())
    for also in (lambda: None, lambda: run.model(batch(seed=3))):
        also()
        run.model.load_state_dict(loaded.state_dict())
        run.step(batch(NAN))
        assert same(held(run.model), held(loaded))
    run.step(batch())
    run.model.load_state_dict(loaded.state_dict(), assign=True)
    run.optimizer.param_groups[0]["params"] = [*run.model.parameters()]
    run.step(batch(NAN))
    assert same(held(run.model), held(loaded))


def test_evaluation_between_is_no_window() -> None:
    run = Run()
    run.step(batch())
    run.model.eval()
    with torch.no_grad():
        run.model(batch(NAN))
    run.model.train()
    run.model[1].running_mean.fill_(3.0)  # by hand, before the next forward
    good = held(run.model)
    with torch.no_grad():
        run.model(batch(NAN))  # pseudo-labels from a bad batch
    run.step(batch(NAN))
    assert same(held(run.model), good)


def test_statistics_that_are_computed_anew_are_good() -> None:
    run = Run()
    run.step(batch())
    torch.optim.swa_utils.update_bn([batch(seed=seed) for seed in range(3)], run.model)
    good = held(run.model)
    run.step(batch(NAN))
    assert same(held(run.model), good)


def test_a_forward_that_raised_half_way() -> None:
    run = Run()
    run.step(batch())
    good = held(run.model)
    head = run.model[2]
    head.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.model(batch(NAN))
    del head.forward
    assert run.step(batch(NAN)).skipped
    assert same(held(run.model), good)


def test_two_models_and_their_optimizers() -> None:
    torch.manual_seed(0)
    generator, critic = norm(), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    g, d = (torch.optim.SGD(model.parameters(), 0.01) for model in (generator, critic))
    amp.prepare(generator, g)
    amp.prepare(critic, d)

    def of_critic(x: Tensor) -> castwise.StepResult:
        d.zero_grad()
        amp.backward(critic(generator(x).detach()).mean())
        return amp.step(d)

    def of_generator(x: Tensor) -> castwise.StepResult:
        g.zero_grad()
        amp.backward(critic(generator(x)).mean())
        return amp.step(g)

    for seed in range(2):
        of_critic(batch(seed=seed))
        of_generator(batch(seed=seed))
    for step in (of_critic, of_generator, of_critic):
        good = held(generator), held(critic)
        result = step(batch(NAN))
        assert same(held(generator), good[0])
        assert same(held(critic), good[1])
        names = {"0.running_mean", "0.running_var"}
        assert set(result.restored) >= {f"Sequential.{name}" for name in names}
        step(batch())


def test_a_graph_that_is_kept_over_a_skipped_step_can_still_be_gone_back() -> None:
    generator, critic = norm(), nn.Linear(2, 1)
    amp = castwise.Amp("fp32", device=DEVICE)
    g, d = (torch.optim.SGD(model.parameters(), 0.01) for model in (generator, critic))
    amp.prepare(generator, g)
    amp.prepare(critic, d)
    made = generator(batch(NAN))
    amp.backward(critic(made.detach()).mean())
    assert amp.step(d).skipped
    d.zero_grad()
    amp.backward(made.sum())
    assert amp.step(g).skipped


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_of_two_optimizers_skips(order: tuple[int, int]) -> None:
    model = norm()
    model.register_parameter("own", nn.Parameter(torch.ones(2)))
    optimizers = torch.optim.SGD([model.own], 0.1), torch.optim.SGD(model[:3].parameters(), 0.1)
    with castwise.Amp("fp32", device=DEVICE) as amp:
        amp.prepare(model, *optimizers)
        good = held(model)
        amp.backward(model(batch(NAN)).sum() + model.own.sum())
        results = [amp.step(optimizers[at]).skipped for at in order]
        assert sorted(results) == [False, True]
        assert same(held(model), good)


def test_steps_with_a_closure() -> None:
    model = norm()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.01, max_iter=2)
    with castwise.Amp("fp32", device=DEVICE) as amp:
        amp.prepare(model, optimizer)

        def step(x: Tensor) -> castwise.StepResult:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                amp.backward(loss)
                return loss

            return amp.step(optimizer, closure=closure)

        step(batch())
        good = held(model)
        assert step(batch(NAN)).restored
        assert same(held(model), good)


# --- other ways to run the model ----------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = norm(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_forwards_write_twice(reentrant: bool) -> None:
    run = Run("bf16-mixed", Checkpointed(reentrant))
    run.step(batch())
    good = held(run.model)
    run.step(batch(NAN))
    assert same(held(run.model), good)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_compiled(how: str, steps: int) -> None:
    run = Run("bf16-mixed")
    whole = run.model
    if how == "torch.compile":
        run.model = torch.compile(whole, backend="aot_eager")
    else:
        whole.compile(backend="aot_eager")
    for seed in range(steps):
        run.step(batch(seed=seed))
    good = held(whole)
    assert run.step(batch(NAN)).restored
    assert same(held(whole), good)
    other = norm()
    other(batch(seed=8))
    whole.load_state_dict(other.state_dict())
    run.step(batch(NAN))
    assert same(held(whole), held(other))


def test_a_model_whose_parts_are_called() -> None:
    parts = nn.ModuleDict({"body": norm(), "head": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(parts.parameters(), 0.01)
    with castwise.Amp("fp32", device=DEVICE) as amp:
        amp.prepare(parts, optimizer)
        for seed in range(3):
            amp.backward(parts["head"](parts["body"](batch(seed=seed))).sum())
            amp.step(optimizer)
            optimizer.zero_grad()
        good = held(parts)
        amp.backward(parts["head"](parts["body"](batch(NAN))).sum())
        assert amp.step(optimizer).skipped
        assert same(held(parts), good)


def test_a_method_that_is_called_from_outside() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = norm()

        def encode(self, x: Tensor) -> Tensor:
            return self.body(x)

    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(model, optimizer, methods=("encode",))
        amp.backward(model.encode(batch()).sum())
        amp.step(optimizer)
        model.body[1].running_mean.fill_(3.0)
        good = held(model)
        amp.backward(model.encode(batch(NAN)).sum())
        amp.step(optimizer)
        assert same(held(model), good)


# --- the session --------------------------------------------------------------------------------------------


def test_close_and_change() -> None:
    run = Run("bf16-mixed")
    run.step(batch(NAN))
    good = held(run.model)
    run.amp.change("bf16-master")
    run.step(batch(NAN))
    assert same(held(run.model), good)
    assert run.amp.restored_buffers == {"1.running_mean": 2, "1.running_var": 2}
    assert copied(run)
    run.amp.close()
    gc.collect()
    assert [one() for one in run.amp._buffers._kept] == [None]
    assert not run.model._load_state_dict_post_hooks
    run.model(batch(NAN))
    assert held(run.model)["1.running_mean"].isnan().any()


def test_the_session_holds_no_model_by_them() -> None:
    run = Run()
    run.step(batch())
    gone = weakref.ref(run.model[1].running_mean)
    run.model = run.optimizer = None  # type: ignore[assignment]
    gc.collect()
    assert gone() is None


def test_copies_of_a_prepared_model_bring_no_copies_of_buffers() -> None:
    run = Run()
    run.step(batch())
    for other in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        other(batch(NAN))
        other.load_state_dict(run.model.state_dict())
        with castwise.Amp("fp32", device=DEVICE) as amp:
            amp.prepare(other)
    assert run.step(batch(NAN)).restored


@contextlib.contextmanager
def _in_inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("around", [_in_inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_a_first_forward_inside_modes(around: Callable[[], Any]) -> None:
    run = Run()
    with contextlib.suppress(RuntimeError), around():
        run.model(batch())
    run.step(batch())
    good = held(run.model)
    run.step(batch(NAN))
    assert same(held(run.model), good)


def test_a_model_without_floating_buffers_has_no_copies() -> None:
    run = Run(model=nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    run.model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(batch(NAN))
    assert copied(run) == set()


def test_a_model_for_inference_has_none_either() -> None:
    model = norm().eval()
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(model, inference=True, keep_originals=True)
        assert amp._buffers._kept == []


def test_an_error_names_parameters_and_the_buffers_are_good_again() -> None:
    run = Run(patience=2)
    good = held(run.model)
    run.step(batch(NAN))
    with pytest.raises(NonFiniteError, match="2 steps in a row"):
        run.step(batch(NAN))
    assert same(held(run.model), good)
    assert run.amp.restored_buffers == {"1.running_mean": 2, "1.running_var": 2}


def test_a_call_with_other_buffers_in_their_place_is_none_of_the_models() -> None:
    run = Run()
    run.step(batch())
    good = held(run.model)
    other = {name: buffer + 5 for name, buffer in run.model.named_buffers()}
    torch.func.functional_call(run.model, other, (batch(),))
    stacked = {name: torch.stack([buffer] * 2) for name, buffer in run.model.eval().named_buffers()}
    torch.func.vmap(lambda buffers, x: torch.func.functional_call(run.model, buffers, (x,)), (0, None))(
        stacked, batch()
    )
    run.model.train()
    assert run.step(batch(NAN)).restored
    assert same(held(run.model), good)


def test_training_by_functional_calls() -> None:
    run = Run()
    weights = dict(run.model.named_parameters())
    for seed in range(2):
        run.optimizer.zero_grad()
        run.amp.backward(torch.func.functional_call(run.model, weights, (batch(seed=seed),)).sum())
        run.amp.step(run.optimizer)
    good = held(run.model)
    run.amp.backward(torch.func.functional_call(run.model, weights, (batch(NAN),)).sum())
    assert run.amp.step(run.optimizer).restored
    assert same(held(run.model), good)


class WrittenParameters(nn.Module):
    """Keeps running averages in parameters that it writes itself, as a well-known VectorQuantizerEMA does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encode, self.kind = nn.Linear(4, 4), kind
        self.code = nn.Embedding(6, 4)
        self.code.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        with torch.no_grad():
            new = self.code.weight.lerp(z.float().mean(0).expand(6, 4), 0.1)
            if self.kind == "in place":
                self.code.weight.copy_(new)
            elif self.kind == "data":
                self.code.weight.data = new
            else:
                self.code.weight = nn.Parameter(new)
        return z + self.code.weight.mean(0).detach()


@pytest.mark.parametrize("kind", ["in place", "data", "replaced"])
@pytest.mark.parametrize("direct", [False, True])
def test_statistics_in_parameters_are_told(kind: str, direct: bool) -> None:
    model = WrittenParameters(kind)
    optimizer = torch.optim.SGD(model.encode.parameters(), 0.1)
    amp = castwise.Amp("fp32", device=DEVICE)
    amp.prepare(model, optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for factor in (1.0, float("nan"), float("nan")):
            optimizer.zero_grad()
            amp.backward(model(torch.ones(3, 4) * factor).square().mean())
            optimizer.step() if direct else amp.step(optimizer)
    assert [("code.weight. Only buffers are restored" in str(w.message)) for w in said] == [True]
    assert amp.skipped_steps == 2
