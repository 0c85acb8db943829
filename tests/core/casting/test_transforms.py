"""torch.func and forward-mode differentiation under plans, with Python numbers as operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, func, nn
from torch.nn import functional

import castwise
from castwise import Plan
from tests.here import DEVICE
from tests.soak import each_value, pairs

X = torch.linspace(-1, 1, 16).reshape(4, 4)
W = torch.linspace(0.5, -0.4, 16).reshape(4, 4)
B = torch.stack([X, X.flip(0), X * 0.5])
PLANS: dict[str, Any] = {
    "native": Plan(compute="bf16"),
    # softmax as well: torch's forward-mode formula for a bf16 softmax calls exp.
    "exp": Plan(compute="bf16", ops={"exp": "fp32", "softmax": "fp32"}),
    "arithmetic": Plan(
        compute="bf16", ops={"linear": "fp32", "mul": "widest", "add": "lower", "rsub": "fp32"}
    ),
    "low": Plan(compute="bf16", ops={"layer_norm": "lower", "softmax": "lower", "exp": "lower"}),
    "cuda": Plan(compute="bf16", rules="cuda"),
    "apex": Plan(compute="bf16", rules="apex"),
    "regions": Plan(compute="bf16", regions={"b": "fp32"}, ops={"exp": "fp32", "softmax": "fp32"}),
}
# Relative error allowed: some tens of bf16 rounding errors (2**-9 each), for bf16 products summed in fp32, a softmax
# and second derivatives of both.
RELATIVE = 0.06


class Net(nn.Module):
    """Layers, and arithmetic with Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = torch.exp(y * 0.5) + 2.0 * y
        y = torch.add(1 - y, 1, alpha=2)
        y = functional.layer_norm(y, (4,))
        return torch.softmax(self.b(y) / 2, -1).pow(2).sum() * 3


def _dual(f: Callable[..., Tensor], w: Tensor) -> Tensor:
    with fwad.dual_level():
        tangent = fwad.unpack_dual(f(fwad.make_dual(w, torch.ones_like(w)), X.to(w))).tangent
    assert tangent is not None
    return tangent


def _plain(f: Callable[..., Tensor], w: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(w, X.to(w)), w)
    return grad


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], Tensor], Any]] = {
    "no transform": _plain,
    "grad": lambda f, w: func.grad(f)(w, X.to(w)),
    "vmap": lambda f, w: func.vmap(f, (None, 0))(w, B.to(w)),
    "vmap of grad": lambda f, w: func.vmap(func.grad(f), (None, 0))(w, B.to(w)),
    "jvp": lambda f, w: func.jvp(lambda v: f(v, X.to(w)), (w,), (torch.ones_like(w),))[1],
    "forward mode": _dual,
    "forward mode of what needs a gradient": lambda f, w: _dual(f, w.clone().requires_grad_()).detach(),
    "jacfwd": lambda f, w: func.jacfwd(f)(w, X.to(w)),
    "jacrev": lambda f, w: func.jacrev(f)(w, X.to(w)),
    "hessian": lambda f, w: func.hessian(f)(w, X.to(w)),
}


def calls(model: nn.Module) -> Callable[..., Tensor]:
    """Return the model as a function of one weight and its input."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        parameters = {name: p.detach().to(w) for name, p in model.named_parameters()}
        out: Tensor = func.functional_call(model, {**parameters, "a.weight": w}, (x,))
        return out

    return f


def by_torch(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def inside(w: Tensor, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return f(w, x)

    return inside


@pytest.fixture(params=PLANS.values(), ids=PLANS.keys())
def plan(request: pytest.FixtureRequest) -> Plan:
    given: Plan = request.param
    return given


@pytest.fixture
def prepared(plan: Plan) -> Iterator[nn.Module]:
    model = Net()
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        yield model


def close(got: Tensor, want: Tensor) -> None:
    scale = max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=RELATIVE * scale)


def skip_what_devices_refuse(transform: Any, plan: Plan) -> None:
    """Skip forward-mode transforms of the plan ``arithmetic`` on devices.

    Devices run exp and layer_norm in fp32, and their forward-mode formulas raise an error when they meet bf16
    arithmetic.
    """
    forward = (TRANSFORMS["jvp"], TRANSFORMS["jacfwd"], TRANSFORMS["hessian"])
    if DEVICE != "cpu" and plan is PLANS["arithmetic"] and transform in forward:
        pytest.skip("overridden arithmetic raises an error in fp32 forward-mode formulas")


@each_value()
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_prepared_models(transform: Any, plan: Plan, prepared: nn.Module) -> None:
    skip_what_devices_refuse(transform, plan)
    got = transform(calls(prepared), W)
    close(got, transform(calls(Net()), W.double()))
    if plan == PLANS["native"]:
        assert torch.equal(got, transform(by_torch(calls(Net())), W))


@each_value()
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_regions(transform: Any, plan: Plan) -> None:
    skip_what_devices_refuse(transform, plan)
    region = castwise.autocast(plan, device_type=DEVICE)
    f = calls(Net())

    def inside(w: Tensor, x: Tensor) -> Tensor:
        with region:
            return f(w, x)

    got = transform(inside, W)
    close(got, transform(f, W.double()))
    with region:
        around = transform(f, W)
    close(around, transform(f, W.double()))
    if plan == PLANS["native"]:
        assert torch.equal(got, transform(by_torch(f), W))


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "x * 0.1": lambda x: x * 0.1,
    "0.1 * x": lambda x: 0.1 * x,
    "x * 257": lambda x: x * 257,
    "x * 65536.0": lambda x: x * 65536.0,
    "x + True": lambda x: x + True,
    "1 - x": lambda x: 1 - x,
    "x - 1": lambda x: x - 1,
    "x / 3": lambda x: x / 3,
    "2 / x": lambda x: 2 / x,
    "add": lambda x: torch.add(x, 1, alpha=2),
    "sub": lambda x: torch.sub(x, 0.3, alpha=2),
    "multiply": lambda x: torch.multiply(x, 0.1),
    "subtract": lambda x: torch.subtract(x, 1, alpha=2),
    "divide": lambda x: torch.divide(x, 3, rounding_mode=None),
    "true_divide": lambda x: x.true_divide(3),
}


@each_value()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
@pytest.mark.parametrize("shape", [(), (3,)], ids=["0-dim", "1-dim"])
@pytest.mark.parametrize("operation", NUMBERS.values(), ids=NUMBERS.keys())
def test_numbers_count_as_numbers(operation: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A transform outside the region gives the same result while a live plan overrides arithmetic."""
    x = torch.full(shape, 3e-5 if dtype.is_floating_point else 3).to(dtype)
    by_torch = torch.autocast(DEVICE, dtype=dtype if dtype in (torch.float16, torch.bfloat16) else None)
    with by_torch:  # under autocast, a device takes reciprocals in fp32
        want = torch.stack([operation(x)] * 2)
        if dtype.is_floating_point:
            value, grad = func.vjp(operation, x)[0], func.grad(lambda t: operation(t).float().sum())(x)
    region = castwise.autocast(Plan(compute="bf16", rules="apex"), device_type=DEVICE)
    with by_torch:
        got = func.vmap(operation)(torch.stack([x, x]))
        assert got.dtype is want.dtype
        assert torch.equal(got, want)
        if dtype.is_floating_point:
            assert torch.equal(func.vjp(operation, x)[0], value)
            assert torch.equal(func.grad(lambda t: operation(t).float().sum())(x), grad)
    del region


def test_numbers_come_first_too() -> None:
    region = castwise.autocast(Plan(compute="bf16", ops={"sub": "fp32"}), device_type=DEVICE)
    for x in (X.bfloat16(), X[0, 0].bfloat16()):
        with region:
            assert torch.equal(1 - x, 1 - x.float())
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            inside = 1 - x
        assert torch.equal(inside, 1 - x)


def test_plans_for_two_devices_come_and_go_in_any_order() -> None:
    f = func.grad(lambda x: (x * 2).sum())
    rows = Plan(compute="bf16", ops={"mul": "fp32"})
    one, two = castwise.autocast(rows, device_type=DEVICE), castwise.autocast(rows, device_type="cuda")
    with one:
        assert torch.equal(f(X), torch.full_like(X, 2))
    del one
    assert torch.equal(f(X), torch.full_like(X, 2))
    with castwise.autocast(rows, device_type=DEVICE):
        del two
        assert torch.equal(f(X), torch.full_like(X, 2))
    assert torch.equal(f(X), torch.full_like(X, 2))


def test_a_transform_compiles_under_a_plan() -> None:
    region = castwise.autocast(PLANS["arithmetic"], device_type=DEVICE)
    f = calls(Net())

    def run(w: Tensor) -> Tensor:
        return func.grad(f)(w, X)

    with region:
        want = run(W)
        got = torch.compile(run, backend="aot_eager")(W)
    close(got, want.double())
    torch._dynamo.reset()


# --- Python numbers that the dispatcher passes to overrides -----------------------------------------------------

WITH_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + 0.7,
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.7),
    "clamp": lambda x: x.clamp(0.2, 0.7),
    "copysign": lambda x: torch.copysign(x, -1.0),
    "div": lambda x: 0.7 / x + torch.div(x, 0.7, rounding_mode="floor"),
    "divide": lambda x: torch.divide(x, 0.7),
    "fmod": lambda x: torch.fmod(x, 0.7),
    "gt": lambda x: x * (x > 0.7),
    "lerp": lambda x: torch.lerp(x, x * x, 0.7),
    "mul": lambda x: 0.7 * x,
    "multiply": lambda x: torch.multiply(x, 0.7),
    "pow": lambda x: x**0.7 + 0.7**x,
    "remainder": lambda x: x % 0.7,
    "rsub": lambda x: torch.rsub(x, 0.7),
    "sub": lambda x: 0.7 - x,
    "subtract": lambda x: torch.subtract(x, 0.7, alpha=2),
    "true_divide": lambda x: x.true_divide(0.7),
    "where": lambda x: torch.where(x > 0.7, x, 0.7) + torch.where(x > 0.7, 0.7, x),
    "xlogy": lambda x: torch.xlogy(x, 0.7) + torch.xlogy(0.7, x),
}


@each_value()
@pytest.mark.parametrize("rule", ["fp32", "lower", "widest", "as_is"])
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_any_override_takes_numbers(name: str, rule: str) -> None:
    """Each operator is overridden alone, so that no other override converts the numbers first."""
    operation = WITH_NUMBERS[name]
    region = castwise.autocast(Plan(compute="bf16", ops={name: rule}), device_type=DEVICE)

    def plain(w: Tensor, x: Tensor) -> Tensor:
        return operation(w.abs() + 0.3 * x.abs() + 0.1).sum()

    def inside(w: Tensor, x: Tensor) -> Tensor:
        with region:
            return plain(w, x)

    for transform in (TRANSFORMS[key] for key in ("no transform", "grad", "vmap", "jvp", "hessian")):
        got, want = transform(inside, W), transform(plain, W)
        if rule == "lower":  # the derivatives are then of rounded values
            assert got.shape == want.shape
            assert got.isfinite().all()
        else:
            assert torch.equal(got, want)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):  # the plan is alive but not in force here
            assert torch.equal(transform(plain, W), want)
    with region:
        low = operation(W.abs().bfloat16() + 0.1)
    assert low.dtype is (torch.float32 if rule == "fp32" and name != "gt" else torch.bfloat16)


# --- an override is the same inside a transform and outside ----------------------------------------------------

HELD: dict[str, tuple[dict[str, str], Callable[..., Tensor]]] = {
    # torch decomposes linear before all transforms, and vmap turns bmm and einsum into matmul.
    "linear": ({"linear": "fp32"}, lambda w, x: functional.linear(x, w)),
    "linear as it is": ({"linear": "as_is"}, lambda w, x: functional.linear(x, w)),
    "matmul": ({"matmul": "fp32"}, lambda w, x: x @ w),
    "bmm": ({"bmm": "fp32"}, lambda w, x: torch.bmm(x[None], w[None])),
    "einsum": ({"einsum": "fp32"}, lambda w, x: torch.einsum("ij,jk->ik", x, w)),
    "conv1d": ({"conv1d": "fp32"}, lambda w, x: functional.conv1d(x[None], w[:, :, None])),
    "with numbers": ({"mul": "fp32", "matmul": "fp32"}, lambda w, x: (x @ w) * 2 - 1),
    "parts": ({"matmul": "fp32", "mm": "fp32", "bmm": "fp32"}, lambda w, x: torch.tensordot(x, w, 1)),
}


@each_value()
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize(("ops", "f"), HELD.values(), ids=HELD.keys())
def test_an_fp32_override_is_fp32_inside(
    ops: dict[str, str], f: Callable[..., Tensor], transform: Any
) -> None:
    region = castwise.autocast(Plan(compute="bf16", ops=ops), device_type=DEVICE)

    def scalar(w: Tensor, x: Tensor) -> Tensor:
        with region:
            out = f(w * 1.001, x)  # bf16 cannot represent this factor exactly
        return out.pow(2).sum()

    def plain(w: Tensor, x: Tensor) -> Tensor:
        return f(w * 1.001, x).pow(2).sum()

    assert torch.equal(transform(scalar, W), transform(plain, W))


@pytest.mark.cpu  # devices cast other parts of einsum than its bmm
def test_parts_of_what_is_taken_apart_are_fp32_on_every_level() -> None:
    region = castwise.autocast(Plan(compute="bf16", ops={"bmm": "fp32"}), device_type=DEVICE)

    def plain(w: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("ij,jk->ik", x, w * 1.001).pow(2).sum()

    def inside(w: Tensor, x: Tensor) -> Tensor:
        with region:
            return torch.einsum("ij,jk->ik", x, w * 1.001).pow(2).sum()

    for transform in (TRANSFORMS["grad"], TRANSFORMS["jvp"], TRANSFORMS["hessian"]):
        assert torch.equal(transform(inside, W), transform(plain, W))


SECOND = {
    **TRANSFORMS,
    "jvp of grad": lambda f, w: func.jvp(lambda v: func.grad(f)(v, X.to(w)), (w,), (torch.ones_like(w),))[1],
    "jacrev of jacrev": lambda f, w: func.jacrev(func.jacrev(f))(w, X.to(w)),
    "jacfwd of jacfwd": lambda f, w: func.jacfwd(func.jacfwd(f))(w, X.to(w)),
    "jacrev of jacfwd": lambda f, w: func.jacrev(func.jacfwd(f))(w, X.to(w)),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda y: torch.softmax(y, -1),
    "log_softmax": lambda y: torch.log_softmax(y, -1),
    "logsumexp": lambda y: torch.logsumexp(y, -1),
    "exp": torch.exp,
    "layer_norm": lambda y: functional.layer_norm(y, (4,)),
}
WITH_EXP = ("softmax", "log_softmax", "logsumexp")  # torch's forward-mode formulas of these call exp
SECOND_PLANS: dict[str, dict[str, str]] = {
    "native": {},
    "exp and what calls it": dict.fromkeys(("exp", *WITH_EXP), "fp32"),
    "fp32": dict.fromkeys(FUNCTIONS, "fp32"),
    "low": dict.fromkeys(FUNCTIONS, "lower"),
    "as it is": dict.fromkeys(FUNCTIONS, "as_is"),
    "softmax low, exp not": {**dict.fromkeys(WITH_EXP, "lower"), "exp": "fp32"},
}


@each_value()
@pytest.mark.parametrize(
    ("function", "ops", "transform"),
    [
        (function, *how)
        for function, how in pairs(FUNCTIONS, list(itertools.product(SECOND_PLANS, SECOND)), 7)
    ],
)
def test_derivatives_of_any_order(function: str, ops: str, transform: str) -> None:
    region = castwise.autocast(Plan(compute="bf16", ops=SECOND_PLANS[ops]), device_type=DEVICE)

    def plain(w: Tensor, x: Tensor) -> Tensor:
        # Rows far from constant: on nearly constant rows layer_norm magnifies every rounding error.
        y = x @ w + torch.arange(4)
        out = FUNCTIONS[function](y)
        return (out * torch.linspace(-0.5, 0.4, out.numel()).reshape(out.shape)).sum()

    def inside(w: Tensor, x: Tensor) -> Tensor:
        with region:
            return plain(w, x)

    close(SECOND[transform](inside, W), SECOND[transform](plain, W.double()))


@pytest.mark.cpu  # only the CPU's lists contain just one part of the formula
def test_a_formula_that_calls_an_override_fails_as_under_torch() -> None:
    """The error that docs/concepts.md describes for derivatives of derivatives. If torch fixes it, update the docs."""
    hessian = func.hessian(lambda w: torch.renorm(X @ w, 2, 0, 1.0).pow(2).sum())
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        func.hessian(by_torch(lambda w, x: torch.renorm(x @ w, 2, 0, 1.0).pow(2).sum()))(W, X)
    assert hessian(W).isfinite().all()
    region = castwise.autocast(Plan(compute="bf16", ops={"exp": "fp32"}), device_type=DEVICE)

    def inside(w: Tensor) -> Tensor:
        with region:
            return torch.logsumexp(X @ w, -1).pow(2).sum()

    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        func.hessian(inside)(W)
