"""The scaler: equal to torch's by default, and each feature beyond it."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from castwise import GradScaler, LossScale
from castwise.core.scaler import ScalePolicy, ScaleState, next_state
from castwise.core.scaler.state import update_on_device
from castwise.errors import PlanError
from tests.here import DEVICE

BAD = st.sampled_from([1.0, 1.0, 1.0, float("inf"), float("nan"), -float("inf")])


# --- like torch's -------------------------------------------------------------------------------------------


class Rig:
    """Two small optimizers driven by one scaler, with everything observable recorded."""

    def __init__(self, scaler: Any, kinds: tuple[str, str], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.scaler = scaler
        self.params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2, dtype=dtype))]
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
            self.note([
                (state["stage"], [flag.item() for flag in state["found_inf_per_device"].values()])
                for state in self.scaler._per_optimizer_states.values()
            ])
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

    def update_by_tensor(self) -> None:
        self.scaler.update(torch.tensor([4.0]))

    def save_and_load(self) -> None:
        self.scaler.load_state_dict(self.scaler.state_dict())

    def pickle(self) -> None:
        self.scaler = pickle.loads(pickle.dumps(self.scaler))

    def pace(self, interval: int) -> Any:
        self.scaler.set_growth_interval(interval)
        self.scaler.set_growth_factor(3.0)
        return self.scaler.get_scale(), self.scaler._get_growth_tracker()

    def scale_list(self) -> Any:
        scaled = self.scaler.scale([torch.ones(2), (torch.tensor(3.0), torch.ones(1, dtype=torch.float64))])
        return str(scaled)


WHICH = st.integers(0, 1)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.none()),
        st.tuples(st.just("backward"), WHICH, BAD),
        st.tuples(st.just("backward"), WHICH, BAD),
        st.tuples(st.just("unscale"), WHICH),
        st.tuples(st.just("step"), WHICH),
        st.tuples(st.just("step"), WHICH),
        st.tuples(st.just("zero"), WHICH),
        st.tuples(st.just("update"), st.sampled_from([None, None, None, 8.0])),
        st.tuples(st.just("update_by_tensor")),
        st.tuples(st.just("save_and_load")),
        st.tuples(st.just("pickle")),
        st.tuples(st.just("pace"), st.integers(1, 3)),
        st.tuples(st.just("scale_list")),
    ),
    min_size=3,
    max_size=30,
)
KINDS = st.tuples(st.sampled_from(["sgd", "adam", "fused"]), st.sampled_from(["sgd", "adam", "fused"]))


@settings(max_examples=150, deadline=None)
@given(
    trace=ACTIONS,
    kinds=KINDS,
    interval=st.integers(1, 3),
    init=st.sampled_from([4.0, 65536.0, 2.0**127]),
    dtype=st.sampled_from(
        [torch.float32, torch.float32, torch.float64, torch.float16]
        + [torch.bfloat16] * (DEVICE != "cuda")  # torch's CUDA scaler does not unscale bf16
    ),
)
def test_it_cannot_be_told_from_torchs(
    trace: Any, kinds: Any, interval: int, init: float, dtype: torch.dtype
) -> None:
    """Random traces of losses, infs, NaNs and calls in right and wrong order give equal states, results and messages."""
    theirs = Rig(torch.amp.GradScaler(DEVICE, init_scale=init, growth_interval=interval), kinds, dtype)
    ours = Rig(GradScaler(DEVICE, init_scale=init, growth_interval=interval), kinds, dtype)
    assert ours.run(trace) == theirs.run(trace)


def test_the_property_test_can_fail() -> None:
    trace = [("backward", 0, float("inf")), ("step", 0), ("update", None)]
    theirs = Rig(torch.amp.GradScaler(DEVICE), ("sgd", "sgd")).run(trace)
    assert Rig(GradScaler(DEVICE, hysteresis=2), ("sgd", "sgd")).run(trace) != theirs


def test_the_default_signature_is_torchs() -> None:
    import inspect

    theirs = list(inspect.signature(torch.amp.GradScaler.__init__).parameters.values())
    ours = list(inspect.signature(GradScaler.__init__).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_states_move_between_torchs_scaler_and_ours() -> None:
    theirs, ours = torch.amp.GradScaler(DEVICE, init_scale=8.0), GradScaler(DEVICE, init_scale=32.0)
    assert set(theirs.state_dict()) == set(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == 8.0
    theirs.load_state_dict(GradScaler(DEVICE, init_scale=2.0).state_dict())
    assert theirs.get_scale() == 2.0


def test_disabled_passes_through() -> None:
    scaler = GradScaler(DEVICE, enabled=False)
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


@pytest.mark.parametrize("options", [{}, {"hysteresis": 2}, {"floor": 1.0}, {"dynamic": False}])
def test_an_update_without_a_step_is_refused_as_by_torch(options: dict[str, Any]) -> None:
    scaler = GradScaler(DEVICE, **options)
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()


def test_a_subclass_has_plain_names_for_itself() -> None:
    class Own(GradScaler):
        def __init__(self) -> None:
            super().__init__(DEVICE, 4.0)
            self.losses, self.flags, self.unscaling, self.outcomes = [], {}, None, 0

    weight = torch.ones(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], 0.5), Own()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.5


def test_a_subclass_that_unscales_its_own_way_is_asked() -> None:
    class Own(GradScaler):
        asked = 0

        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            self.asked += 1
            super().unscale_(optimizer)

    p = nn.Parameter(torch.ones(1))
    scaler = Own(DEVICE)
    scaler.scale(p.sum()).backward()
    scaler.step(torch.optim.SGD([p], 0.5))
    assert scaler.asked == 1
    assert float(p.detach()) == 0.5


@pytest.mark.sparse
def test_sparse_gradients_are_those_of_torchs() -> None:
    def run(scaler: Any, bad: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        table = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
        loss = table(torch.tensor([1, 1, 3])).sum() * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return table.weight.detach().tolist(), scaler.state_dict()

    for bad in (False, True):
        assert run(GradScaler(DEVICE), bad) == run(torch.amp.GradScaler(DEVICE), bad)


def test_pickle_keeps_everything() -> None:
    scaler = GradScaler(DEVICE, init_scale=64.0, hysteresis=3, floor=1.0)
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
    floor=st.sampled_from([None, 0.1, 1.0]),
    ceiling=st.sampled_from([None, 64.1]),
    dynamic=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(
    policy=POLICIES,
    outcomes=st.lists(st.booleans(), max_size=40),
    init=st.sampled_from([1.0, 16.0, 1000.0, 2.0**127, 2.0**-149]),
)
@example(policy=ScalePolicy(ceiling=64.1), outcomes=[False], init=1000.0)
@example(policy=ScalePolicy(floor=1.0), outcomes=[True], init=0.5)
@example(policy=ScalePolicy(hysteresis=2), outcomes=[True, False, True], init=16.0)
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
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    assert scaler.next_state(True).scale == 4.0
    assert scaler.next_state(False) == ScaleState(8.0, 1, 0)
    assert scaler.state_dict() == before


def test_floor_and_ceiling_hold() -> None:
    scaler = GradScaler.from_loss_scale(
        LossScale(init=4.0, interval=1, floor=2.0, ceiling=8.0), DEVICE, patience=100
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


@settings(max_examples=60, deadline=None)
@given(
    outcomes=st.lists(st.booleans(), max_size=15),
    hysteresis=st.integers(1, 3),
    bounds=st.sampled_from([(None, None), (1.0, None), (None, 64.0), (0.3, 33.3)]),
    fused=st.booleans(),
    dynamic=st.booleans(),
)
def test_scaler_and_pure_rule_agree(
    outcomes: list[bool], hysteresis: int, bounds: tuple[Any, Any], fused: bool, dynamic: bool
) -> None:
    scaler = GradScaler(
        DEVICE, 16.0, growth_interval=2, hysteresis=hysteresis, floor=bounds[0], ceiling=bounds[1], dynamic=dynamic,
        patience=100,
    )  # fmt: skip
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([p], fused=True) if fused else torch.optim.SGD([p], 0.1)
    for found in outcomes:
        want = scaler.next_state(found)
        scaler.scale(p.sum() * (float("nan") if found else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        got = scaler.next_state(True), scaler.next_state(False)
        assert got == (next_state(want, True, scaler.policy), next_state(want, False, scaler.policy))
        assert scaler.get_scale() == want.scale


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hysteresis": 0}, r"hysteresis=0\) is not allowed. Allowed: a whole number >= 1"),
        ({"floor": 0.0}, r"floor=0.0\) is not allowed. Allowed: None, or a finite number > 0"),
        ({"ceiling": float("inf")}, r"ceiling=inf\) is not allowed"),
        ({"floor": 8.0, "ceiling": 4.0}, "the floor is above the ceiling"),
        ({"ceiling": 4.0}, "init_scale=65536.0, .*must lie between floor and ceiling"),
        ({"patience": 0}, r"patience=0\) is not allowed. Allowed: a whole number >= 1"),
        ({"reduce": print, "process_group": 1}, "reduce or process_group, not both"),
    ],
)
def test_limits_that_cannot_be_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        GradScaler(DEVICE, **arguments)


def test_scales_set_from_outside_stay_between_floor_and_ceiling() -> None:
    scaler = GradScaler(DEVICE, 4.0, floor=2.0, ceiling=8.0)
    scaler.scale(torch.ones(()))
    scaler.update(64.0)
    assert scaler.get_scale() == 8.0
    scaler.load_state_dict({**scaler.state_dict(), "scale": 0.5})
    assert scaler.get_scale() == 2.0


def test_low_precision_losses_of_any_shape_are_scaled_in_fp32() -> None:
    scaler = GradScaler(DEVICE)
    assert scaler.scale(torch.ones(2, dtype=torch.float16)).dtype is torch.float32
    assert torch.isfinite(scaler.scale(torch.full((2,), 4.0, dtype=torch.float16))).all()
    # Torch's scaler overflows here.
    assert not torch.isfinite(torch.amp.GradScaler(DEVICE).scale(torch.full((2,), 4.0).half())).any()
    pair = scaler.scale((torch.full((2,), 4.0).half(), [torch.full((1,), 4.0).bfloat16()]))
    assert [pair[0].dtype, pair[1][0].dtype] == [torch.float32, torch.float32]
    assert pair[0].tolist() == [2.0**18] * 2
    lazy = scaler.scale(x for x in [torch.full((2,), 4.0).half()])
    assert [x.tolist() for x in lazy] == [[2.0**18] * 2]
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(3.0)


def test_infinite_scale_is_never_reached() -> None:
    state = ScaleState(2.0**127)
    for _ in range(3):
        state = next_state(state, False, ScalePolicy(interval=1))
    assert math.isfinite(state.scale)
