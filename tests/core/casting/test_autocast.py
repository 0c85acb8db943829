"""The autocast region: a superset of torch's, thread-local, re-entrant, and without effect outside."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import castwise
from castwise import Plan
from castwise.core.casting import kernels
from castwise.errors import BannedOperatorError, PlanError
from tests.here import DEVICE

X = torch.linspace(-1, 1, 16).reshape(4, 4)
SIGMOID_FP32 = Plan(compute="bf16", ops=[("sigmoid", "fp32")])


def state() -> tuple[object, ...]:
    """Return all of torch's autocast state on this thread."""
    devices = ("cpu", "cuda", "xpu", "mps", "maia", "hpu", "ipu")
    return (
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
        torch.is_autocast_cache_enabled(),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_spelling_gives_torch_results(dtype: torch.dtype) -> None:
    def program() -> list[torch.Tensor]:
        y = X @ X
        return [
            y,
            torch.sigmoid(y),
            torch.cat([X, y]),
            torch.nn.functional.mse_loss(y, y * 0),
            torch.cumsum(y, 0),
        ]

    with torch.autocast(DEVICE, dtype=dtype):
        want = program()
    with castwise.autocast(DEVICE, dtype=dtype):
        got = program()
    for a, b in zip(got, want, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


class Formats(TorchDispatchMode):
    """Records the dtypes that ``_log_softmax`` is called on."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._log_softmax.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "autocast"),
    [
        (DEVICE, partial(castwise.autocast, "bf16-mixed+rules=cuda", device_type=DEVICE)),
        pytest.param("cuda", partial(torch.autocast, "cuda", torch.bfloat16), marks=pytest.mark.gpu),
        pytest.param("cuda", partial(castwise.autocast, "bf16-mixed", device_type="cuda"), marks=pytest.mark.gpu),
    ],
    ids=["its prediction", "torch", "castwise"],
)  # fmt: skip
def test_cross_entropy_on_a_gpu_rounds_its_log_softmax_to_the_format_of_the_logits(
    device: str, autocast: Callable[[], AbstractContextManager[None]]
) -> None:
    """Log-softmax is on the fp32 list, but cross_entropy passes the dtype of its input, and the list does not replace
    it.
    """
    logits, classes = X.to(device, torch.bfloat16), torch.arange(4, device=device)
    with Formats() as found, autocast():
        torch.nn.functional.cross_entropy(logits, classes)
        torch.nn.functional.log_softmax(logits, 0)
    assert found.dtypes == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((DEVICE,), {}),
        ((), {"device_type": DEVICE}),
        (("bf16",), {"device_type": DEVICE}),
        (("bf16-mixed",), {"device_type": DEVICE}),
        ((torch.bfloat16,), {"device_type": DEVICE}),
        ((Plan(compute="bf16"),), {"device_type": DEVICE}),
        ((DEVICE, torch.bfloat16, True, True), {}),
        ((f"{DEVICE}:0",), {}),
        ((torch.bfloat16,), {"device_type": f"{DEVICE}:0"}),
    ],
)
def test_every_spelling(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Without a format the region uses the device's default autocast dtype."""
    asked = any("bf16" in str(value) or "bfloat16" in str(value) for value in (*args, *kwargs.values()))
    with castwise.autocast(*args, **kwargs):
        assert (X @ X).dtype is (torch.bfloat16 if asked else torch.get_autocast_dtype(DEVICE))


def test_state_is_restored_after_nesting_and_exceptions() -> None:
    before = state()
    region = castwise.autocast(SIGMOID_FP32, device_type=DEVICE)
    with pytest.raises(ZeroDivisionError), region, castwise.autocast(DEVICE, enabled=False), region:
        raise ZeroDivisionError
    assert state() == before


def test_the_format_that_a_script_sets_is_used_and_what_it_sets_inside_ends_with_the_block() -> None:
    before, before_dtype = state(), torch.get_autocast_dtype(DEVICE)
    torch.set_autocast_dtype(DEVICE, torch.float16)
    try:
        with castwise.autocast(DEVICE), castwise.autocast(device_type=DEVICE):
            assert (X @ X).dtype is torch.float16
    finally:
        torch.set_autocast_dtype(DEVICE, before_dtype)
    for outer in (castwise.autocast, torch.autocast):
        with outer(DEVICE):
            assert (X @ X).dtype is before_dtype
            with castwise.autocast(DEVICE):
                torch.set_autocast_dtype(DEVICE, torch.float16)
                torch.set_autocast_enabled(DEVICE, False)
            assert (X @ X).dtype is before_dtype
    assert state() == before


def test_an_instance_can_be_entered_again_while_active() -> None:
    region = castwise.autocast("bf16", device_type=DEVICE)
    with region:
        with region:
            assert (X @ X).dtype is torch.bfloat16
        assert (X @ X).dtype is torch.bfloat16
    assert (X @ X).dtype is torch.float32  # torch.autocast stays enabled here


def test_disabled_island() -> None:
    with castwise.autocast("bf16", device_type=DEVICE):
        with castwise.autocast(DEVICE, enabled=False):
            assert (X @ X).dtype is torch.float32
        with castwise.autocast("fp32", device_type=DEVICE):
            assert (X @ X).dtype is torch.float32
        assert (X @ X).dtype is torch.bfloat16


def test_decorator() -> None:
    @castwise.autocast("bf16", device_type=DEVICE)
    def product(a: torch.Tensor) -> torch.Tensor:
        """Doc."""
        return a @ a

    assert product(X).dtype is torch.bfloat16
    assert product.__doc__ == "Doc."
    assert (X @ X).dtype is torch.float32


def test_copies_and_pickles_mean_the_same() -> None:
    region = castwise.autocast(SIGMOID_FP32, device_type=DEVICE)
    for other in (pickle.loads(pickle.dumps(region)), copy.deepcopy(region)):
        with other:
            assert torch.sigmoid(X.bfloat16()).dtype is torch.float32


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (("tpu-mixed",), {}, "tpu-mixed"),
        (("bf16",), {"device_type": "tpu"}, "cpu, cuda, xpu, mps"),
        (("bf16-mixed", torch.float16), {"device_type": DEVICE}, "leave dtype out"),
        ((DEVICE, torch.int8), {}, "int8"),
        ((DEVICE,), {"device_type": "xpu"}, "two device types"),
        ((DEVICE, torch.int8), {}, f"In {DEVICE.upper()} autocast, but the target dtype is not supported"),
        (
            (DEVICE, torch.float64),
            {},
            "torch.autocast would warn and cast nothing; to cast nothing, give enabled=False",
        ),
        ((), {"device_type": 3}, "Expected `device_type` of type `str`, got: `<class 'int'>`; allowed: cpu"),
        ((3,), {}, "Expected `device_type` of type `str`, got: `<class 'int'>`: .*the name of a preset"),
        (([],), {}, "Expected `device_type` of type `str`, got: `<class 'list'>`"),
        ((), {"device_type": "tpu"}, "User specified an unsupported autocast device_type 'tpu'"),
    ],
)
def test_bad_calls_say_what_is_allowed(
    args: tuple[object, ...], kwargs: dict[str, object], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        castwise.autocast(*args, **kwargs)


# --- as a torch.autocast --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        (DEVICE,),
        (DEVICE, torch.bfloat16),
        (DEVICE, torch.float16, True, False),
        (DEVICE, torch.int8, False),
        (DEVICE, None, False),
        ("cuda", torch.bfloat16, False),
    ],
)
def test_it_is_one_with_its_attributes(args: tuple[object, ...]) -> None:
    ours, theirs = castwise.autocast(*args), torch.autocast(*args)
    assert isinstance(ours, torch.autocast)
    for name in ("device", "fast_dtype", "_enabled", "_cache_enabled", "custom_backend_name"):
        assert getattr(ours, name) == getattr(theirs, name), name
    plan = castwise.autocast(SIGMOID_FP32, device_type=DEVICE)
    assert (plan.device, plan.fast_dtype, plan._enabled) == (DEVICE, torch.bfloat16, True)
    assert castwise.autocast("fp32", device_type=DEVICE)._enabled is False


def test_only_functions_can_be_decorated() -> None:
    """Decorating a non-function raises torch's error; torch refuses it since 2.12."""
    said = []
    for decorator in (torch.autocast(DEVICE), castwise.autocast(DEVICE)):
        try:
            decorator(3)
            said.append(None)
        except TypeError as error:
            said.append(str(error))
    assert said[0] == said[1]


# --- overrides ----------------------------------------------------------------------------------------------


def test_override_holds_inside_and_only_inside() -> None:
    low = X.bfloat16()
    native = castwise.autocast("bf16", device_type=DEVICE)
    region = castwise.autocast(SIGMOID_FP32, device_type=DEVICE)
    assert "sigmoid" in kernels.registered(DEVICE)
    with region:
        assert torch.sigmoid(low).dtype is torch.float32
        with native:
            assert torch.sigmoid(low).dtype is torch.bfloat16
        with torch.autocast(DEVICE, enabled=False):
            assert torch.sigmoid(low).dtype is torch.bfloat16
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.sigmoid(low).dtype is torch.bfloat16
    assert torch.sigmoid(low).dtype is torch.bfloat16
    del region
    assert "sigmoid" not in kernels.registered(DEVICE)


def test_listed_operators_behave_as_torch_outside_a_live_plan() -> None:
    """Outside the plan's region, every override kernel gives torch's results bit for bit."""

    def program() -> list[torch.Tensor]:
        y = X @ X
        z = torch.nn.functional.linear(y, X, X[0])
        loss = torch.nn.functional.mse_loss(z, z * 0)
        return [y, z, loss, torch.cat([X, y]), torch.cumsum(y, 0), torch.nn.functional.softmax(y, -1)]

    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        want = program()
    region = castwise.autocast("O1", device_type=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = program()
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with region:
        assert torch.nn.functional.softmax(X @ X, -1).dtype is torch.float32


def test_every_rule_casts_as_it_says() -> None:
    low, wide = X.bfloat16(), X
    plan = Plan(
        compute="bf16",
        ops={"sigmoid": "fp32", "softmax": "lower", "linear": "as_is", "add": "widest", "log": "banned"},
    )
    with castwise.autocast(plan, device_type=DEVICE):
        assert torch.sigmoid(low).dtype is torch.float32
        assert torch.softmax(wide, -1).dtype is torch.bfloat16
        assert torch.nn.functional.linear(wide, wide).dtype is torch.float32
        assert torch.add(low, X.half()).dtype is torch.float32
        assert torch.add(low, low).dtype is torch.bfloat16
        with pytest.raises(BannedOperatorError, match=r"aten::log .*ops=\(\(\"log\", \"fp32\"\),\)"):
            torch.log(wide)


def test_banned_operator_can_be_an_fp32_island() -> None:
    cuda = Plan(compute="bf16", rules="cuda")
    p, t = torch.full((3,), 0.5).bfloat16(), torch.ones(3).bfloat16()
    with (
        castwise.autocast(cuda, device_type=DEVICE),
        pytest.raises(
            (BannedOperatorError, RuntimeError), match="binary_cross_entropy"
        ),  # or torch bans it itself
    ):
        torch.nn.functional.binary_cross_entropy(p, t)
    with castwise.autocast(
        Plan(compute="bf16", rules="cuda", ops={"binary_cross_entropy": "fp32"}), device_type=DEVICE
    ):
        assert torch.nn.functional.binary_cross_entropy(p, t).dtype is torch.float32


def test_fp64_and_integers_are_left_alone() -> None:
    with castwise.autocast(SIGMOID_FP32, device_type=DEVICE):
        assert torch.sigmoid(X.double()).dtype is torch.float64
        assert torch.sigmoid(torch.arange(3)).dtype is torch.float32


def test_custom_operator_follows_its_rule() -> None:
    lib = torch.library.Library("castwise_test", "FRAGMENT")
    lib.define("twice(Tensor x) -> Tensor")
    lib.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    with castwise.autocast(Plan(compute="bf16", ops={"castwise_test::twice": "lower"}), device_type=DEVICE):
        assert torch.ops.castwise_test.twice(X).dtype is torch.bfloat16
    assert torch.ops.castwise_test.twice(X).dtype is torch.float32


def test_tensors_given_by_name_alone_follow_the_rule_too() -> None:
    lib = torch.library.Library("castwise_test", "FRAGMENT")
    lib.define("times(Tensor x, *, Tensor by) -> Tensor")
    lib.impl("times", lambda x, *, by: x * by, "CompositeExplicitAutograd")
    with castwise.autocast(Plan(compute="bf16", ops={"castwise_test::times": "lower"}), device_type=DEVICE):
        assert torch.ops.castwise_test.times(X, by=X).dtype is torch.bfloat16


def test_gradients_flow_through_overrides() -> None:
    w = torch.nn.Parameter(X.clone())
    with castwise.autocast(
        Plan(compute="bf16", ops={"layer_norm": "lower", "sigmoid": "fp32"}), device_type=DEVICE
    ):
        out = torch.sigmoid(torch.nn.functional.layer_norm(w, (4,)))
    out.sum().backward()
    assert w.grad is not None
    assert w.grad.dtype is torch.float32
    assert torch.isfinite(w.grad).all()


def test_threads_are_independent() -> None:
    seen = {}
    region = castwise.autocast(SIGMOID_FP32, device_type=DEVICE)
    inside, done = threading.Event(), threading.Event()

    def plain() -> None:
        inside.wait(10)
        seen["other"] = ((X @ X).dtype, torch.sigmoid(X.bfloat16()).dtype)
        done.set()

    thread = threading.Thread(target=plain)
    thread.start()
    with region:
        inside.set()
        assert done.wait(10)
        seen["here"] = ((X @ X).dtype, torch.sigmoid(X.bfloat16()).dtype)
    thread.join()
    assert seen == {
        "other": (torch.float32, torch.bfloat16),
        "here": (torch.bfloat16, torch.float32),
    }


# --- the weight-cast cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", ["bf16-mixed", Plan(compute="bf16", ops={"linear": "lower", "sigmoid": "fp32"})]
)
def test_cache_off_sees_weights_written_inside_the_region(plan: object) -> None:
    w = torch.nn.Parameter(X.clone())
    with castwise.autocast(plan, device_type=DEVICE, cache_enabled=False):
        first = torch.nn.functional.linear(X, w)
        with torch.no_grad():
            w.mul_(2)
        second = torch.nn.functional.linear(X, w)
    assert torch.equal(second, first * 2)


def test_the_documented_stale_case_is_real() -> None:
    """A weight changed by hand inside an ambient region keeps its old low-precision copy: the case for
    ``cache_enabled=False``.
    """
    w = torch.nn.Parameter(X.clone())
    with castwise.autocast("bf16", device_type=DEVICE):
        first = torch.nn.functional.linear(X, w)
        with torch.no_grad():
            w.mul_(2)
        assert torch.equal(torch.nn.functional.linear(X, w), first)


def test_a_region_in_another_format_does_not_get_the_first_ones_copy() -> None:
    w = torch.nn.Parameter(X.clone())
    with castwise.autocast("bf16", device_type=DEVICE):
        torch.nn.functional.linear(X, w)
        with castwise.autocast("fp16", device_type=DEVICE):
            assert torch.nn.functional.linear(X, w).dtype is torch.float16
        assert torch.nn.functional.linear(X, w).dtype is torch.bfloat16


def test_override_cache_is_keyed_by_grad_mode_and_version() -> None:
    w = torch.nn.Parameter(X.clone())
    with castwise.autocast(Plan(compute="bf16", ops={"layer_norm": "lower"}), device_type=DEVICE):
        with torch.no_grad():
            torch.nn.functional.layer_norm(X, (4,), w[0])
            torch.nn.functional.layer_norm(X, (4, 4), w)
        out = torch.nn.functional.layer_norm(X, (4, 4), w)
        out.float().pow(2).sum().backward()
        with torch.no_grad():
            w.mul_(2)
        again = torch.nn.functional.layer_norm(X, (4, 4), w)
    assert w.grad is not None
    assert torch.equal(again, out * 2)


def test_a_low_weight_has_a_copy_for_each_use_as_in_torch() -> None:
    """With one copy for both uses, the gradients would be added in fp16 and overflow."""
    w = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    x = torch.ones(4, dtype=torch.float16)
    with castwise.autocast(Plan(compute="fp16", ops={"mul": "lower"}), device_type=DEVICE):
        uses = [x * w, x * w]
    torch.autograd.backward(uses, [x * 40000.0] * 2)
    assert w.grad is not None
    assert w.grad.isfinite().all()


def test_a_mistyped_device_type_is_told_of_device_types() -> None:
    with pytest.raises(castwise.CastwiseError, match=r"no such preset.*Or a device type: cpu, cuda"):
        castwise.autocast("cuda8")
