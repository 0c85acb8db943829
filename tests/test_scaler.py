"""The scaler: torch's own by default, and each thing beyond it."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from castwise import GradScaler, LossScale
from castwise.errors import CheckpointError, LossScaleError, StateError
from castwise.scaler import (
    ScalePolicy,
    ScaleState,
    from_apex,
    from_colossalai,
    next_state,
    to_apex,
    to_colossalai,
)
from castwise.scaler.state import update_on_device

BAD = st.sampled_from([1.0, 1.0, 1.0, float("inf"), float("nan"), -float("inf")])


# --- like torch's -------------------------------------------------------------------------------------------


class Rig:
    """Two little optimizers driven by one scaler, with everything observable written down."""

    def __init__(self, scaler: Any, kinds: tuple[str, str]) -> None:
        torch.manual_seed(0)
        self.scaler = scaler
        self.params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
        make = {
            "sgd": lambda p: torch.optim.SGD([p], 0.1, momentum=0.9),
            "adam": lambda p: torch.optim.Adam([p], 0.1),
            "fused": lambda p: torch.optim.AdamW([p], 0.1, fused=True),
        }
        self.optimizers = [make[kind](p) for kind, p in zip(kinds, self.params, strict=True)]
        self.log: list[Any] = []

    def note(self, value: Any) -> None:
        self.log.append(repr(value))

    def run(self, trace: list[tuple[Any, ...]]) -> list[Any]:
        for action, *args in trace:
            try:
                self.note(getattr(self, action)(*args))
            except (RuntimeError, AssertionError, ValueError, AttributeError) as error:
                self.note((type(error).__name__, str(error)))
            self.note(self.scaler.state_dict() if self.scaler._scale is not None else None)
            self.note([p.detach().tolist() for p in self.params])
            self.note([None if p.grad is None else p.grad.tolist() for p in self.params])
        return self.log

    def backward(self, which: int, factor: float) -> Any:
        loss = (self.params[which] ** 2).sum() * factor
        scaled = self.scaler.scale(loss)
        scaled.backward()
        return scaled.item()

    def unscale(self, which: int) -> None:
        self.scaler.unscale_(self.optimizers[which])

    def step(self, which: int) -> Any:
        return self.scaler.step(self.optimizers[which])

    def zero(self, which: int) -> None:
        self.optimizers[which].zero_grad()

    def update(self, new: float | None) -> None:
        self.scaler.update(new)

    def scale_list(self) -> Any:
        scaled = self.scaler.scale([torch.ones(2), (torch.tensor(3.0), torch.ones(1, dtype=torch.float64))])
        return str(scaled)


WHICH = st.integers(0, 1)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("backward"), WHICH, BAD),
        st.tuples(st.just("backward"), WHICH, BAD),
        st.tuples(st.just("unscale"), WHICH),
        st.tuples(st.just("step"), WHICH),
        st.tuples(st.just("step"), WHICH),
        st.tuples(st.just("zero"), WHICH),
        st.tuples(st.just("update"), st.sampled_from([None, None, None, 8.0])),
        st.tuples(st.just("scale_list")),
    ),
    min_size=3,
    max_size=30,
)
KINDS = st.tuples(st.sampled_from(["sgd", "adam", "fused"]), st.sampled_from(["sgd", "adam", "fused"]))


@settings(max_examples=150, deadline=None)
@given(trace=ACTIONS, kinds=KINDS, interval=st.integers(1, 3), init=st.sampled_from([4.0, 65536.0, 2.0**127]))
def test_it_cannot_be_told_from_torchs(trace: Any, kinds: Any, interval: int, init: float) -> None:
    """Random traces of losses, infs, NaNs, right and wrong orders of calls: every state, result and message equal."""
    theirs = Rig(torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval), kinds).run(trace)
    ours = Rig(GradScaler("cpu", init_scale=init, growth_interval=interval), kinds).run(trace)
    assert ours == theirs


def test_the_property_test_can_fail() -> None:
    trace = [("backward", 0, float("inf")), ("step", 0), ("update", None)]
    theirs = Rig(torch.amp.GradScaler("cpu"), ("sgd", "sgd")).run(trace)
    assert Rig(GradScaler("cpu", hysteresis=2), ("sgd", "sgd")).run(trace) != theirs


def test_the_default_signature_is_torchs() -> None:
    import inspect

    theirs = list(inspect.signature(torch.amp.GradScaler.__init__).parameters.values())
    ours = list(inspect.signature(GradScaler.__init__).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_states_move_between_torchs_scaler_and_ours() -> None:
    theirs, ours = torch.amp.GradScaler("cpu", init_scale=8.0), GradScaler("cpu", init_scale=32.0)
    assert set(theirs.state_dict()) == set(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == 8.0
    theirs.load_state_dict(GradScaler("cpu", init_scale=2.0).state_dict())
    assert theirs.get_scale() == 2.0


def test_disabled_passes_through() -> None:
    scaler = GradScaler("cpu", enabled=False)
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], 1.0)
    loss = (p * 2).sum()
    assert scaler.scale(loss) is loss
    scaler.backward(loss, params=[p])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert float(p.detach()) == -1.0
    assert scaler.state_dict() == {}
    assert not scaler.result_of(optimizer).skipped


def test_pickle_keeps_everything() -> None:
    scaler = GradScaler("cpu", init_scale=64.0, hysteresis=3, floor=1.0)
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], 0.1)
    scaler.scale(p.sum() * float("inf"), "other").backward()
    scaler.step(optimizer)
    scaler.update()
    twin = pickle.loads(pickle.dumps(scaler))
    assert twin.state_dict() == scaler.state_dict()
    assert twin.policy == scaler.policy


# --- the rule -----------------------------------------------------------------------------------------------


POLICIES = st.builds(
    ScalePolicy,
    growth=st.sampled_from([2.0, 1.5, 4.0]),
    backoff=st.sampled_from([0.5, 0.3]),
    interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    floor=st.sampled_from([None, 0.25, 1.0]),
    ceiling=st.sampled_from([None, 64.0]),
    dynamic=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(
    policy=POLICIES,
    outcomes=st.lists(st.booleans(), max_size=40),
    init=st.sampled_from([1.0, 16.0, 2.0**127]),
)
def test_device_and_pure_rule_agree_bit_for_bit(
    policy: ScalePolicy, outcomes: list[bool], init: float
) -> None:
    state = ScaleState(init)
    scale, growth = torch.tensor(init), torch.tensor(0, dtype=torch.int32)
    hysteresis = torch.tensor(0, dtype=torch.int32)
    for found in outcomes:
        state = next_state(state, found, policy)
        update_on_device(scale, growth, hysteresis, torch.tensor(float(found)), policy)
        assert (float(scale), int(growth)) == (state.scale, state.growth_tracker)
        if not policy.is_plain:
            assert int(hysteresis) == state.hysteresis_tracker


def test_hysteresis_counts_until_the_scale_grows() -> None:
    policy = ScalePolicy(interval=2, hysteresis=2)
    state, scales = ScaleState(16.0), []
    for found in (True, False, True, True, False, False, True, True):
        state = next_state(state, found, policy)
        scales.append(state.scale)
    assert scales == [16, 16, 8, 4, 4, 8, 8, 4]


def test_next_state_is_pure() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    assert scaler.next_state(True).scale == 4.0
    assert scaler.next_state(False) == ScaleState(8.0, 1, 0)
    assert scaler.state_dict() == before


def test_floor_and_ceiling_hold() -> None:
    scaler = GradScaler.from_loss_scale(
        LossScale(init=4.0, interval=1, floor=2.0, ceiling=8.0), "cpu", patience=100
    )
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], 0.0)
    seen = []
    for factor in [float("inf")] * 3 + [1.0] * 4:
        scaler.scale(p.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    assert seen == [2, 2, 2, 4, 8, 8, 8]


def test_a_scale_at_its_floor_raises_with_names() -> None:
    model = nn.ModuleDict({"good": nn.Linear(2, 2, bias=False), "bad": nn.Linear(2, 2, bias=False)})
    for fused in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
        scaler = GradScaler("cpu", init_scale=4.0, floor=1.0, patience=3)
        scaler.param_names = lambda: {id(p): name for name, p in model.named_parameters()}

        def train(steps: int, scaler: GradScaler = scaler, optimizer: Any = optimizer) -> None:
            for _ in range(steps):
                loss = model["good"].weight.sum() + model["bad"].weight.sum() * float("nan")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        train(2)  # from 4 down to the floor
        words = r"3 times in a row.*floor, 1; first affected: bad\.weight\. No"
        with pytest.raises(LossScaleError, match=words):
            train(1)


def test_low_precision_losses_of_any_shape_are_scaled_in_fp32() -> None:
    scaler = GradScaler("cpu")
    assert scaler.scale(torch.ones(2, dtype=torch.float16)).dtype is torch.float32
    assert torch.isfinite(scaler.scale(torch.full((2,), 4.0, dtype=torch.float16))).all()
    assert not torch.isfinite(torch.amp.GradScaler("cpu").scale(torch.full((2,), 4.0).half())).any()  # why


# --- named losses -------------------------------------------------------------------------------------------


def test_gradients_of_two_losses_are_brought_to_one_scale() -> None:
    p = nn.Parameter(torch.ones(4))
    q = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p, q], 0.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler._loss("b").scale.fill_(1024.0)
    for name, factor in (("a", 1.0), ("b", 10.0), ("a", 100.0)):
        scaler.backward((p * factor).sum() + (q.sum() if name == "b" else 0.0), name, params=[p, q])
    scaler.unscale_(optimizer)
    assert torch.equal(p.grad, torch.full((4,), 111.0))
    assert torch.equal(q.grad, torch.ones(4))


@pytest.mark.parametrize(("broken", "want"), [("a", (4.0, 8.0)), ("b", (8.0, 4.0)), ("", (8.0, 8.0))])
@pytest.mark.parametrize("order", list(itertools.permutations("ab")))
def test_each_loss_moves_by_its_own_outcome(
    broken: str, want: tuple[float, float], order: tuple[str, ...]
) -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], 0.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    for name in order:
        scaler.backward((p * (float("inf") if name == broken else 1.0)).sum(), name, params=lambda: [p])
    scaler.step(optimizer)
    assert scaler.result_of(optimizer).skipped == bool(broken)
    scaler.update()
    assert (scaler.get_scale("a"), scaler.get_scale("b")) == want


def test_named_losses_in_windows_of_their_own() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], 1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler._loss("b").scale.fill_(2.0)
    scaler.scale(p.sum(), "b").backward()
    assert torch.equal(p.grad, torch.full((4,), 2.0))
    scaler.step(optimizer)
    assert torch.equal(p.detach(), torch.zeros(4))  # unscaled by b's own scale
    scaler.update()
    optimizer.zero_grad()
    fused = torch.optim.AdamW([p], 1.0, weight_decay=0.0, fused=True)
    scaler.scale(p.sum(), "b").backward()
    scaler.step(fused)
    assert torch.allclose(p.detach(), -torch.ones(4))
    assert torch.equal(p.grad, torch.ones(4))  # a fused step leaves unscaled gradients
    scaler.update()


def test_scale_refuses_a_second_loss_in_a_window() -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()), "a")
    with pytest.raises(StateError, match=r"scaler\.backward"):
        scaler.scale(torch.ones(()), "b")


def test_named_losses_survive_saving() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, hysteresis=2)
    scaler.scale(torch.ones(()))
    scaler._loss("b").scale.fill_(2.0)
    other = GradScaler("cpu", hysteresis=2)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale("b") == 2.0
    assert other.state_dict() == scaler.state_dict()


# --- agreement, sync, outcome -------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("returns", [False, True])
def test_another_ranks_overflow_skips_here_too(fused: bool, first: bool, returns: bool) -> None:
    def reduce(flag: torch.Tensor) -> torch.Tensor | None:
        if returns:
            return torch.ones_like(flag)
        flag.fill_(1.0)
        return None

    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p], 0.1, fused=fused)
    scaler = GradScaler("cpu", reduce=reduce)
    scaler.scale(p.sum()).backward()
    if first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    result = scaler.result_of(optimizer)
    scaler.update()
    assert result.skipped
    assert torch.equal(p.detach(), torch.ones(2))
    assert scaler.get_scale() == 32768.0


def test_a_rank_without_gradients_takes_part() -> None:
    calls = []
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.1)
    scaler = GradScaler("cpu", reduce=lambda flag: calls.append(flag))
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert len(calls) == 1


class CountSyncs(TorchDispatchMode):
    """Counts reads of device values by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("extras", [{}, {"hysteresis": 2}, {"ceiling": 2.0**20}])
def test_fused_optimizers_need_no_host_sync(extras: dict[str, Any]) -> None:
    p = nn.Parameter(torch.ones(2))
    scaler = GradScaler("cpu", **extras)
    optimizer = torch.optim.AdamW([p], 0.1, fused=True)
    scaler.scale(p.sum()).backward()
    with CountSyncs() as syncs:
        scaler.step(optimizer)
        scaler.update()
    assert syncs.count == 0
    plain = torch.optim.SGD([p], 0.1)
    with CountSyncs() as syncs:
        scaler.scale(p.sum()).backward()
        scaler.step(plain)
    assert syncs.count == 1  # the counter counts


def test_result_outlives_the_window() -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizers = [torch.optim.AdamW([p], 0.1, fused=True) for p in params]
    scaler = GradScaler("cpu")
    scaler.scale(params[0].sum() + params[1].sum() * float("inf")).backward()
    results = []
    for optimizer in optimizers:
        scaler.step(optimizer)
        results.append(scaler.result_of(optimizer))
    scaler.update()
    assert [r.skipped for r in results] == [False, True]
    assert [float(r.found_inf) > 0 for r in results] == [False, True]
    assert "skipped=True" in repr(results[1])


def test_fp16_gradients() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([p], 0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(p.float().sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)
    scaler = GradScaler("cpu", init_scale=8.0, allow_fp16_grads=True)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert torch.equal(p.grad, torch.ones(2).half())


# Dynamo itself looks at .grad of the input of a resumed frame, and Inductor still uses torch.jit.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_loop_with_a_fused_optimizer() -> None:
    def run(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
        scaler = GradScaler("cpu")

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        call = torch.compile(step, backend="aot_eager") if compiled else step
        return [float(call(torch.ones(2, 4))) for _ in range(3)]

    assert run(True) == pytest.approx(run(False), rel=1e-5)


# --- foreign states -----------------------------------------------------------------------------------------


def test_apex_states_round_trip() -> None:
    theirs = {
        "loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7},
        "loss_scaler1": {"loss_scale": 16.0, "unskipped": 0},
    }
    scaler = GradScaler("cpu")
    scaler.load_state_dict(from_apex(theirs, names=("loss", "second")))
    assert (scaler.get_scale(), scaler.get_scale("second")) == (1024.0, 16.0)
    assert to_apex(scaler.state_dict()) == theirs
    for bad in ({}, {"loss_scaler0": {"scale": 1}}, {"x": {"loss_scale": 1.0, "unskipped": 0}}):
        with pytest.raises(CheckpointError):
            from_apex(bad)


def test_colossalai_states_round_trip() -> None:
    theirs = {
        "scale": torch.tensor([512.0]), "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1000,
        "growth_step": 3, "hysteresis_step": 1,
    }  # fmt: skip
    scaler = GradScaler("cpu", hysteresis=2)
    scaler.load_state_dict(from_colossalai(theirs))
    assert to_colossalai(scaler.state_dict()) == {**theirs, "scale": 512.0}
    with pytest.raises(CheckpointError, match="unexpected or missing"):
        from_colossalai({"loss": 1})


def test_infinite_scale_is_never_reached() -> None:
    state = ScaleState(2.0**127)
    for _ in range(3):
        state = next_state(state, False, ScalePolicy(interval=1))
    assert math.isfinite(state.scale)
