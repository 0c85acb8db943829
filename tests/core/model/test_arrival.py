"""Models whose parameters are in bf16 or fp16 before prepare, in whole or in part, under every plan."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise.core import checkpoint
from castwise.core.plans.plan import PRESETS
from castwise.errors import PlanError, StateError
from tests.core.masters.presets import ALL, MASTERS
from tests.here import DEVICE
from tests.soak import each_value

LOW = [torch.bfloat16, torch.float16]
WIDE = [name for name in ALL if PRESETS[name].params == "fp32"]


class Tied(nn.Module):
    """An embedding with weights tied to the output, and a buffer added to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("positions", torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 100).long() % 12
        out: Tensor = self.out(self.norm(self.embedding(tokens) + self.positions))
        return out


class Counting(nn.Module):
    """Keeps a running mean in a buffer, as normalisation layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {"plain": plain, "tied": Tied, "batch norm": Counting}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
}


def arrive(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().to(dtype)


def train(amp: castwise.Amp, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = (model(torch.randn(4, 6, generator=generator)).float() - 1).square().mean()
        amp.backward(loss)
        amp.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def weights(amp: castwise.Amp, model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in amp.model_state_dict(model).items()}


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in model.state_dict().items()}


def is_widened(model: nn.Module, plan: str) -> bool:
    """Return whether a plan that stores parameters low has anything to widen."""
    return PRESETS[plan].params == "fp32" or any(b.is_floating_point() for b in model.buffers())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert value.dtype is other[name].dtype, name


# --- the digits -----------------------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [*((kind, "fused adamw") for kind in MODELS), *(("plain", name) for name in ("sgd", "adamw"))],
)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("plan", ALL)
def test_a_model_that_arrives_low_trains_like_the_float_model(
    plan: str, dtype: torch.dtype, kind: str, optimizer: str
) -> None:
    """The model is widened where the plan stores fp32, and gets masters from its values otherwise."""
    model = arrive(kind, dtype)
    reference = copy.deepcopy(model).float()
    found = []
    for one in (model, reference):
        updates = OPTIMIZERS[optimizer](one.parameters())
        with castwise.Amp(plan, device=DEVICE) as amp:
            amp.prepare(one, updates, widen=one is model and is_widened(one, plan))
            found.append((train(amp, one, updates), weights(amp, one), dtypes(one)))
    (losses, ours, stored), (wanted, theirs, stored_there) = found
    assert torch.equal(losses, wanted)
    same(ours, theirs)
    assert stored == stored_there


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("plan", MASTERS)
def test_masters_hold_the_very_values_that_arrived(plan: str, dtype: torch.dtype) -> None:
    model = arrive("plain", dtype)
    before = {name: value.float() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        same(amp.model_state_dict(model), before)
        assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}


# --- in place, and back ---------------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, torch.bfloat16) for kind in MODELS] + [("batch norm", torch.float16)]
)
@pytest.mark.parametrize("plan", ALL)
def test_close_stores_a_model_as_it_arrived(plan: str, dtype: torch.dtype, kind: str, steps: int) -> None:
    """Restores parameters, gradients and optimizer state; references to them stay valid throughout."""
    model = arrive(kind, dtype)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)
    model(torch.randn(4, 6).to(dtype)).float().square().mean().backward()
    optimizer.step()
    objects = list(map(id, model.parameters()))
    before, stored = {k: v.clone() for k, v in model.state_dict().items()}, dtypes(model)
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer, widen=is_widened(model, plan))
    rounded = amp.plan.master == "none" and amp.plan.compute_dtype is not dtype  # rounded permanently
    if steps:
        optimizer.zero_grad()
        train(amp, model, optimizer, steps)
    if steps or rounded:
        before = weights(amp, model)
    amp.close()
    assert dtypes(model) == stored
    assert list(map(id, model.parameters())) == objects
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == objects
    assert all(p.grad is None or p.grad.dtype is dtype for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name].to(value.dtype)), name
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {dtype}
    if not (steps or rounded):
        assert all(map(torch.equal, moments, (s["exp_avg"] for s in optimizer.state.values())))
    model(torch.randn(4, 6).to(dtype)).float().square().mean().backward()
    optimizer.step()


def test_state_that_an_optimizer_has_already_is_widened_with_its_parameter() -> None:
    """Training continues as in the fp32 model whose optimizer loads the same state."""
    model = arrive("plain", torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)
    model(torch.randn(4, 6).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    reference = copy.deepcopy(model).float()
    other = torch.optim.Adam(reference.parameters(), 1e-2, eps=1e-4)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found = []
    for one, updates, widen in ((model, optimizer, True), (reference, other, False)):
        amp = castwise.Amp("bf16-mixed", device=DEVICE)
        amp.prepare(one, updates, widen=widen)
        found.append((train(amp, one, updates), weights(amp, one)))
    assert torch.equal(found[0][0], found[1][0])
    same(found[0][1], found[1][1])


def test_a_gradient_that_lies_there_is_widened() -> None:
    model = nn.Linear(6, 3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(4, 6).bfloat16()).float().square().mean().backward()
    assert model.weight.grad is not None
    before = model.weight.grad.clone()
    castwise.Amp("fp32", device=DEVICE).prepare(model, optimizer, widen=True)
    assert model.weight.grad.dtype is torch.float32
    assert torch.equal(model.weight.grad, before.float())


def test_a_prepare_that_fails_after_widening_leaves_the_model_as_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = arrive("batch norm", torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def fail(*_: Any) -> None:
        raise RuntimeError("here")

    monkeypatch.setattr("castwise.core.session.apply.check_updates", fail)
    with pytest.raises(RuntimeError, match="here"):
        castwise.Amp("fp32", device=DEVICE).prepare(model, optimizer, widen=True)
    same(dict(model.state_dict()), before)
    assert castwise.Amp.of(model) is None


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("plan", WIDE)
def test_inference_is_that_of_the_float_model(plan: str, dtype: torch.dtype) -> None:
    model = arrive("plain", dtype).eval()
    reference = copy.deepcopy(model).float()
    x = torch.randn(4, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with castwise.Amp(plan, device=DEVICE) as one, castwise.Amp(plan, device=DEVICE) as other:
        one.prepare(model, inference=True, keep_originals=True, widen=True)
        other.prepare(reference, inference=True, keep_originals=True)
        with torch.inference_mode():
            assert torch.equal(model(x), reference(x))
        assert dtypes(model) == dtypes(reference)
    same(dict(model.state_dict()), before)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("plan", WIDE)
def test_batches_in_the_format_of_the_model_are_widened_with_it(
    plan: str, dtype: torch.dtype, inference: bool
) -> None:
    torch.manual_seed(0)
    model, x = plain().to(DEVICE, dtype).eval(), torch.randn(5, 6, device=DEVICE).to(dtype)
    wide = copy.deepcopy(model).float()
    with castwise.Amp(plan, device=DEVICE) as amp, torch.no_grad():
        amp.prepare(model, inference=inference, keep_originals=inference, widen="all" if inference else True)
        got = model(x)
    with castwise.Amp(plan, device=DEVICE) as amp, torch.no_grad():
        amp.prepare(wide, inference=inference, keep_originals=inference)
        assert torch.equal(got, wide(x.float()))


def test_inputs_of_a_model_with_a_low_base_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 6).bfloat16().requires_grad_(False), nn.Linear(6, 2).bfloat16()).to(
        DEVICE
    )
    seen: list[torch.dtype] = []
    model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with castwise.Amp("fp32", device=DEVICE) as amp:
        amp.prepare(model, widen=True)
        with pytest.raises(RuntimeError):  # fp32 weights meet what the bf16 base returns, as without castwise
            model(torch.randn(5, 6, device=DEVICE).bfloat16())
    assert seen == [torch.bfloat16]


def test_an_optimizer_made_after_widening_joins() -> None:
    model = arrive("plain", torch.bfloat16)
    first = torch.optim.SGD(list(model.parameters())[:2], 0.1)
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    amp.prepare(model, first, widen=True)
    second = torch.optim.Adam(list(model.parameters())[2:], 0.1)
    amp.prepare(model, second, widen=True)
    train(amp, model, second)
    amp.close()
    assert {s["exp_avg"].dtype for s in second.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_of_an_optimizer_that_joins_is_widened_too(optimizer: str) -> None:
    """An optimizer with state, prepared after its model, behaves like one prepared with it."""
    found = []
    for late in (True, False):
        model = arrive("plain", torch.bfloat16)
        updates = OPTIMIZERS[optimizer](model.parameters())
        model(
            torch.randn(4, 6, generator=torch.Generator().manual_seed(0), device="cpu").to(DEVICE).bfloat16()
        ).float().square().mean().backward()
        updates.step()
        updates.zero_grad()
        amp = castwise.Amp("bf16-mixed", device=DEVICE)
        if late:
            amp.prepare(model, widen=True)
        amp.prepare(model, updates, widen=True)
        losses = train(amp, model, updates)
        found.append((losses, weights(amp, model)))
        amp.close()
        assert {v.dtype for s in updates.state.values() for k, v in s.items() if k != "step"} == {
            torch.bfloat16
        }
    assert torch.equal(found[0][0], found[1][0])
    same(found[0][1], found[1][1])


@each_value()
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("bf16-mixed", "fp32"),
        ("bf16-mixed", "bf16-master"),
        ("bf16-mixed", "fp16-master"),
        ("fp16-mixed", "bf16-mixed"),
        ("bf16-master", "bf16-mixed"),
        ("bf16-master", "fp16-master"),
        ("fp16-master", "bf16-master+ops.exp=fp32"),
    ],
)
def test_what_training_has_made_of_it_outlives_a_change_of_plan(first: str, then: str, kind: str) -> None:
    """Changing the plan and back loses no bits, though ``close`` would round; the result equals the fp32 model's."""
    model = arrive(kind, torch.bfloat16)
    stored = dtypes(model)
    reference = copy.deepcopy(model).float()
    found = []
    for one in (model, reference):
        updates = OPTIMIZERS["adamw"](one.parameters())
        with castwise.Amp(first, device=DEVICE) as amp:
            amp.prepare(one, updates, widen=one is model and is_widened(one, first))
            losses = []
            for plan in (then, first):
                losses.append(train(amp, one, updates))
                before = weights(amp, one)
                amp.change(plan)
                same(before, weights(amp, one))
            found.append((torch.cat([*losses, train(amp, one, updates)]), weights(amp, one)))
    assert torch.equal(found[0][0], found[1][0])
    same(found[0][1], found[1][1])
    assert dtypes(model) == stored


def test_a_change_of_plan_that_fails_loses_nothing() -> None:
    model = arrive("plain", torch.bfloat16)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    amp.prepare(model, optimizer, widen=True)
    train(amp, model, optimizer)
    before, moments = weights(amp, model), [s["exp_avg"].clone() for s in optimizer.state.values()]
    with pytest.raises(castwise.CastwiseError, match="nowhere"):
        amp.change("bf16-master+regions.nowhere=fp32")
    same(weights(amp, model), before)
    assert all(map(torch.equal, moments, (s["exp_avg"] for s in optimizer.state.values())))
    train(amp, model, optimizer)


@pytest.mark.parametrize("how", ["added", "unfrozen"])
def test_an_optimizer_that_joins_does_not_train_low_what_came_later(how: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).bfloat16()
    model[1].requires_grad_(how == "added")
    amp = castwise.Amp("bf16-mixed", device=DEVICE)
    amp.prepare(model, torch.optim.SGD(model[0].parameters(), 0.1), widen=True)
    if how == "added":
        model[1] = nn.Linear(4, 3).bfloat16()
    model[1].requires_grad_()
    late = torch.optim.SGD(model[1].parameters(), 0.1)
    with pytest.raises(StateError, match=r"1.weight, 1.bias .*after it was prepared.* bfloat16"):
        amp.prepare(model, late, widen=True)
    assert not amp.holds(late)
    if how == "added":
        model[1].float()
        amp.prepare(model, late, widen=True)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("plan", MASTERS)
def test_an_optimizer_without_masters_does_not_step_what_has_them(plan: str, dtype: torch.dtype) -> None:
    model = arrive("plain", dtype)
    optimizer, stranger = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    (model(torch.randn(4, 6)).float() - 1).square().mean().backward()
    with pytest.raises(StateError, match=r"SGD.step\(\)"):
        stranger.step()
    amp.close()
    stranger.step()


# --- in part --------------------------------------------------------------------------------------------------------


def part() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16).bfloat16(), nn.LayerNorm(16), nn.Linear(16, 3).half())


@pytest.mark.parametrize("plan", ALL)
def test_a_model_that_arrives_in_part_low(plan: str) -> None:
    model, reference = part(), part().float()
    found = []
    for one in (model, reference):
        updates = torch.optim.SGD(one.parameters(), 0.1)
        with castwise.Amp(plan, device=DEVICE) as amp:
            amp.prepare(one, updates, widen=one is model and PRESETS[plan].params == "fp32")
            found.append((train(amp, one, updates), weights(amp, one)))
    assert torch.equal(found[0][0], found[1][0])
    same(found[0][1], found[1][1])
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in part().parameters()]


def adapted(base: torch.dtype) -> nn.ModuleDict:
    """Return a frozen base with a table in a buffer, and a trained head."""
    torch.manual_seed(0)

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.inner = nn.Module()
            self.inner.register_buffer("table", torch.randn(6))

    model = nn.ModuleDict({"base": Base().to(base).requires_grad_(False), "head": nn.Linear(6, 3).to(base)})
    model.head.register_buffer("scale", torch.ones(3, dtype=base))
    return model


@pytest.mark.parametrize(
    ("widen", "base"), [(True, torch.bfloat16), ("all", torch.float32)], ids=["trained", "all"]
)
@pytest.mark.parametrize("plan", WIDE)
def test_a_frozen_base_stays_as_it_is_stored_unless_asked(plan: str, widen: Any, base: torch.dtype) -> None:
    model = adapted(torch.bfloat16)
    optimizer = torch.optim.SGD(model["head"].parameters(), 0.1)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer, widen=widen)
        assert {d for name, d in dtypes(model).items() if name.startswith("base")} == {base}
        assert {d for name, d in dtypes(model).items() if name.startswith("head")} == {torch.float32}
    assert set(dtypes(model).values()) == {torch.bfloat16}


@pytest.mark.parametrize("plan", ALL)
def test_a_frozen_base_alone_asks_for_nothing(plan: str) -> None:
    model = adapted(torch.bfloat16)
    model["head"].float()
    optimizer = torch.optim.SGD(model["head"].parameters(), 0.1)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        assert model["head"].weight.dtype in (torch.float32, amp.plan.compute_dtype)


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "bf16-master", "bf16-true"])
def test_a_frozen_layer_that_arrives_low_is_fp32_where_a_region_runs_in_fp32(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8).bfloat16().requires_grad_(False), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    with castwise.Amp(plan + "+regions.0=fp32", device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        train(amp, model, optimizer, 1)
        assert model[0].weight.dtype is torch.float32
    assert model[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("plan", WIDE)
@pytest.mark.parametrize("by_itself", [False, True], ids=["amp.step", "optimizer.step"])
def test_what_is_unfrozen_later_is_not_trained_low_unseen(plan: str, by_itself: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3).bfloat16().requires_grad_(False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with castwise.Amp(plan, device=DEVICE, nonfinite="skip") as amp:
        amp.prepare(model, optimizer)
        amp.backward(model[0].weight.sum())
        amp.step(optimizer)
        model[1].requires_grad_(True)
        model[1].weight.grad = torch.zeros_like(model[1].weight)
        with pytest.raises(StateError, match=r"SGD.step\(\): 1.weight .* was frozen .* widen='all'"):
            (optimizer.step if by_itself or amp.plan.loss_scale else functools.partial(amp.step, optimizer))()
    optimizer.step()


# --- what is quantised ----------------------------------------------------------------------------------------------


class Sealed(Tensor):
    """A tensor that reports fp32 and holds int8, like torchao's."""

    @staticmethod
    def __new__(cls, packed: Tensor, scale: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, packed.shape, dtype=scale.dtype, device=packed.device)

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        self.packed, self.scale = packed, scale

    def __tensor_flatten__(self) -> Any:
        return ["packed", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Sealed:
        return Sealed(inner["packed"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Sealed(args[0].packed, args[0].scale)
        raise AssertionError(f"{func} on quantised weights")


class Packed(nn.Parameter):
    """Packed bits that report bf16, as in bitsandbytes with ``quant_storage=torch.bfloat16``."""


def of_torchao() -> nn.Module:
    layer = nn.Linear(6, 6)
    sealed = Sealed(torch.ones(6, 6, dtype=torch.int8), torch.ones(6, 1))
    layer.weight = nn.Parameter(sealed, requires_grad=False)
    return layer


class OfGPTQ(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.ones(6, 6, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(6, dtype=torch.float16))
        self.register_buffer("bias", torch.ones(6, dtype=torch.float16))


class OfBits(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        data = torch.ones(6, 6).to(dtype)
        self.weight = (Packed if dtype is torch.bfloat16 else nn.Parameter)(data, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(6, dtype=torch.float16), requires_grad=False)


QUANTISED: dict[str, Callable[[], nn.Module]] = {
    "torchao": of_torchao,
    "gptq": OfGPTQ,
    "bitsandbytes": lambda: OfBits(torch.uint8),
    "bitsandbytes in bf16": lambda: OfBits(torch.bfloat16),
    "fp8": lambda: OfBits(torch.float8_e4m3fn),
}


def tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


@each_value()
@pytest.mark.parametrize("widen", [False, "all"])
@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("plan", ALL)
def test_a_quantised_base_is_left_alone(plan: str, kind: str, widen: Any) -> None:
    model = nn.ModuleDict({"base": QUANTISED[kind](), "adapter": nn.Linear(6, 3).bfloat16()})
    before = [
        (id(t), t.dtype, type(t), t.data_ptr() if type(t) is not Sealed else 0)
        for t in tensors(model["base"])
    ]
    optimizer = torch.optim.SGD(model["adapter"].parameters(), 0.1)
    stores = PRESETS[plan].params
    with castwise.Amp(plan, device=DEVICE) as amp:
        if stores == "fp32" and not widen:
            with pytest.raises(PlanError, match="widen=True"):
                amp.prepare(model, optimizer)
            return
        amp.prepare(model, optimizer, widen=widen if stores == "fp32" else False)
        print(amp.resolve(model))
        assert model["adapter"].weight.dtype in (torch.float32, amp.plan.compute_dtype)
        now = [
            (id(t), t.dtype, type(t), t.data_ptr() if type(t) is not Sealed else 0)
            for t in tensors(model["base"])
        ]
        assert now == before


@pytest.mark.parametrize("plan", ALL)
def test_a_bias_that_is_trained_beside_quantised_weights_is_trained_by_the_plan(plan: str) -> None:
    layer = OfBits(torch.uint8)
    layer.bias.requires_grad_(True)
    model = nn.ModuleDict({"base": layer})
    optimizer = torch.optim.SGD([layer.bias], 0.1)
    with castwise.Amp(plan, device=DEVICE) as amp:
        if PRESETS[plan].params == "fp32":
            with pytest.raises(PlanError, match=r"base\.bias are stored in fp16.*widen=True"):
                amp.prepare(model, optimizer)
        amp.prepare(model, optimizer, widen=PRESETS[plan].params == "fp32")
        assert layer.weight.dtype is torch.uint8
        held = optimizer.param_groups[0]["params"][0]
        assert held.dtype is torch.float32 or PRESETS[plan].master == "none"
    assert layer.bias.dtype is torch.float16


# --- saves ----------------------------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("plan", ALL)
def test_weights_are_given_back_in_the_format_that_they_arrived_in_if_asked(
    plan: str, dtype: torch.dtype
) -> None:
    model = arrive("tied", dtype)
    stored = dtypes(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer, widen=is_widened(model, plan))
        train(amp, model, optimizer)
        full, given = amp.model_state_dict(model), amp.model_state_dict(model, as_given=True)
        assert {value.dtype for value in full.values()} == {torch.float32}
        assert {name: value.dtype for name, value in given.items()} == stored
        assert all(torch.equal(value, full[name].to(value.dtype)) for name, value in given.items())
        assert given["out.weight"] is given["embedding.weight"]
        inside = amp.model_state_dict(model.get_submodule("norm"), as_given=True)
        assert {value.dtype for value in inside.values()} == {dtype}
    again = arrive("tied", dtype)
    again.load_state_dict(given)
    same(dict(again.state_dict()), given)


@each_value()
@pytest.mark.parametrize("later", ["fp32", "bf16-mixed", "bf16-master", "bf16-true"])
@pytest.mark.parametrize("first", ["fp32", "bf16-mixed", "bf16-master", "bf16-true"])
def test_saves_of_such_sessions_move_between_plans(first: str, later: str, tmp_path: Path) -> None:
    """The checkpoint resumes a newly made low-precision model and an fp32 model alike."""
    model = arrive("plain", torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)
    amp = castwise.Amp(first, device=DEVICE)
    amp.prepare(model, optimizer, widen=is_widened(model, first))
    train(amp, model, optimizer)
    checkpoint.save(tmp_path, 3, model=model, optimizers=optimizer, amp=amp)
    saved, found_save = weights(amp, model), checkpoint.newest(tmp_path)
    amp.close()
    assert found_save is not None
    found = []
    for low in (True, False):
        one = arrive("plain", torch.bfloat16) if low else arrive("plain", torch.bfloat16).float()
        updates = torch.optim.Adam(one.parameters(), 1e-2, eps=1e-4)
        with castwise.Amp(later, device=DEVICE) as other:
            other.prepare(one, updates, widen=low and is_widened(one, later))
            checkpoint.load(found_save, model=one, optimizers=updates, amp=other)
            if PRESETS[later].master == "fp32" or PRESETS[first].master == "none":
                same(weights(other, one), saved)
            found.append((train(other, one, updates), weights(other, one)))
    assert torch.equal(found[0][0], found[1][0])
    same(found[0][1], found[1][1])


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("plan", WIDE)
def test_the_error_offers_to_widen_and_says_what_that_takes(plan: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    short = "bf16" if dtype is torch.bfloat16 else "fp16"
    with castwise.Amp(plan, device=DEVICE) as amp, pytest.raises(PlanError) as caught:
        amp.prepare(model, optimizer)
    said = str(caught.value)
    assert f"0.weight, 1.weight are stored in {short}" in said
    assert "prepare(..., widen=True) stores them in fp32, which takes 4.00 MiB more" in said
    assert "-master'" in said


@pytest.mark.parametrize("plan", ["bf16-true", "bf16-master", "fp16-true"])
def test_widening_under_a_plan_that_stores_all_low_is_refused(plan: str) -> None:
    model = arrive("plain", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with castwise.Amp(plan, device=DEVICE) as amp:
        with pytest.raises(PlanError, match=r"prepare\(widen=True\).*there is nothing to widen.*-mixed'"):
            amp.prepare(model, optimizer, widen=True)
        amp.prepare(model, optimizer)


@pytest.mark.parametrize("plan", ALL)
def test_widening_a_float_model_does_nothing(plan: str) -> None:
    model = MODELS["batch norm"]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with castwise.Amp(plan, device=DEVICE) as amp:
        assert amp.resolve(model, widen="all") == amp.resolve(model)
        amp.prepare(model, optimizer, widen=True)


@pytest.mark.parametrize("value", ["yes", 1, None, torch.float32])
def test_other_values_of_widen_are_refused(value: Any) -> None:
    amp = castwise.Amp("fp32", device=DEVICE)
    for call in (amp.prepare, amp.resolve):
        with pytest.raises(
            PlanError, match=rf"{call.__name__}\(widen=.* is not allowed. Allowed: False; True"
        ):
            call(nn.Linear(2, 2), widen=value)


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed+loss_scale.init=8"])
def test_parameters_that_join_an_optimizer_in_bf16_are_refused_at_its_next_step(plan: str) -> None:
    model, extra = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)

    def step() -> None:
        amp.backward(extra(model(torch.ones(2, 4)).to(extra.weight.dtype)).float().sum())
        amp.step(optimizer)

    optimizer.add_param_group({"params": extra.parameters()})
    before = extra.weight.clone()
    for _ in range(2):
        with pytest.raises(
            StateError, match=r"added to this optimizer after prepare, 2 of them.*in bfloat16"
        ):
            step()
        assert torch.equal(extra.weight, before)
    extra.float()
    step()
    assert not torch.equal(extra.weight, before)
    amp.close()
    optimizer.add_param_group({"params": nn.Linear(1, 1).bfloat16().parameters()})
    optimizer.step()


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master", "bf16-mixed+regions.0=bf16"])
@pytest.mark.parametrize("way", ["group", "append", "replace"])
def test_parameters_in_bf16_are_refused_by_whatever_way_they_join(plan: str, way: str) -> None:
    model, extra = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    new = list(extra.parameters())
    if way == "group":
        optimizer.add_param_group({"params": new})
    elif way == "append":
        optimizer.param_groups[0]["params"].extend(new)
    else:
        optimizer.param_groups[0]["params"][:] = new
    before = extra.weight.clone()
    amp.backward(extra(model(torch.ones(2, 4)).to(extra.weight.dtype)).float().sum())
    with pytest.raises(StateError, match=r"added to this optimizer after prepare, 2 of them.*in bfloat16"):
        amp.step(optimizer)
    assert torch.equal(extra.weight, before)


def test_a_model_that_was_prepared_alone_has_no_masters_in_an_optimizer_it_joins() -> None:
    model, head, other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    amp = castwise.Amp("bf16-master", device=DEVICE)
    amp.prepare(model, optimizer)
    optimizer.add_param_group({"params": list(head.parameters())})
    amp.prepare(head, optimizer)
    before = amp.model_state_dict(head)["weight"].clone()

    def step() -> None:
        amp.backward(other(head(model(torch.ones(2, 4)))).sum())
        amp.step(optimizer)

    step()
    assert not torch.equal(amp.model_state_dict(head)["weight"], before)
    amp.prepare(other)
    optimizer.add_param_group({"params": list(other.parameters())})
    with pytest.raises(StateError, match=r"which these do not have.*amp.prepare\(model, optimizer\)"):
        step()
