"""Error messages for mismatched dtypes: the place, the operator, and a fix that has been tried."""

from __future__ import annotations

import ast
import copy
import linecache
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import castwise
from castwise.core.model import complaints
from castwise.core.model.complaints import cures
from castwise.core.plans.rules import base_table
from tests.here import DEVICE

LOW = ("bf16-mixed", "fp16-mixed", "bf16-master", "bf16-true")
X = torch.linspace(-1, 1, 64).reshape(8, 8)


class Net(nn.Module):
    """A model whose forward ends with a function given by the test."""

    def __init__(self, call: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.call, self.calls = call, 0

    def own(self, x: Tensor) -> Tensor:
        """Run user code with a visible side effect."""
        self.calls += 1
        return self.layer(x)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def prepared(plan: str, call: Callable[[Net, Tensor], Any]) -> tuple[castwise.Amp, Net]:
    model, amp = Net(call), castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    return amp, model


def complaint(plan: str, call: Callable[[Net, Tensor], Any]) -> str:
    """Return castwise's message for a call that fails under a plan."""
    amp, model = prepared(plan, call)
    with amp, pytest.raises((RuntimeError, TypeError)) as caught:
        model(X)
    return str(caught.value).partition("\ncastwise: ")[2]


def line_of(call: Callable[..., Any], text: str) -> int:
    """Return the line number where a function contains a text."""
    first = call.__code__.co_firstlineno
    lines = linecache.getlines(__file__)[first - 1 :]
    return first + next(index for index, line in enumerate(lines) if text in line)


# --- the operator and the line --------------------------------------------------------------------------------


@torch.library.custom_op("advice::same", mutates_args=())
def same(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype is not b.dtype:
        raise TypeError(f"a and b should be the same, got {a.dtype} and {b.dtype}")
    return a + b


@torch.library.custom_op("advice::low", mutates_args=())
def only_low(a: Tensor) -> Tensor:
    if a.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"only fp16 and bf16 are supported, got dtype {a.dtype}")
    return a.clone()


@pytest.mark.parametrize("plan", LOW[:2])
@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda self, x: torch.linalg.slogdet(self.layer(x))[1], "linalg_slogdet=fp32"),
        (lambda self, x: self.layer(x).slogdet()[1], "slogdet=fp32"),
        (lambda self, x: torch.complex(self.layer(x).bfloat16(), x.float()), "complex=widest"),
        (lambda self, x: torch.special.bessel_j0(input=self.layer(x)), "special_bessel_j0=fp32"),
        pytest.param(
            lambda self, x: torch.sparse.mm(torch.eye(8).to_sparse_csr(), self.layer(x)), "_sparse_mm=widest",
            marks=pytest.mark.sparse,
        ),
        (lambda self, x: same(self.layer(x), torch.ones(8, 8)), "advice::same=widest"),
        (lambda self, x: same(self.layer(x), torch.ones(8, 8)), "advice::same=lower"),
        (lambda self, x: torch.ops.advice.same(self.layer(x), torch.ones(8, 8)), "advice::same=lower"),
        (lambda self, x: only_low(torch.ones(8, 8)), "advice::low=lower"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_rule_that_is_printed_is_taken_and_cures(
    plan: str, call: Callable[[Net, Tensor], Any], rule: str
) -> None:
    said = complaint(plan, call)
    assert f"ops.{rule}" in said
    assert "No rule" not in said
    assert f"test_complaints.py, line {call.__code__.co_firstlineno}, in <lambda>" in said
    whole = re.search("as in '([^']+)'", said)
    assert whole is not None
    for line in (f"{plan}+ops.{rule}", whole.group(1)):
        amp, model = prepared(line, call)
        with amp:
            model(X)


def test_a_long_plan_is_not_printed_whole() -> None:
    line = "bf16-mixed" + "".join(f"+regions.type:Conv{'x' * i}=fp32" for i in range(20))
    said = complaint(line, lambda self, x: torch.lerp(self.layer(x), torch.ones(8, 8), 0.5))
    assert "add ops.lerp=widest or ops.lerp=lower to the plan; or write" in said


def into_zeros(self: Net, x: Tensor) -> Tensor:
    message = self.layer(x)
    total = torch.zeros(8, 8)
    total.index_add_(0, torch.arange(8), message)
    return total


def into_earlier_zeros(self: Net, x: Tensor) -> Tensor:
    total = x.new_zeros((8, 8), dtype=torch.float32)
    message = self.layer(x)
    total[torch.arange(8)] = message
    return total


def into_fresh(self: Net, x: Tensor) -> Tensor:
    message = self.layer(x)
    return torch.zeros(8, 8).scatter_add_(0, torch.zeros(8, 8, dtype=torch.long), message)


def into_one_given(self: Net, x: Tensor) -> Tensor:
    message = self.layer(x)
    return x.double().clone().index_add_(0, torch.arange(8), message)


@pytest.mark.parametrize("plan", LOW)
@pytest.mark.parametrize(
    ("call", "write", "at"),
    [
        (into_zeros, "torch.zeros(8, 8, dtype=message.dtype)", "total ="),
        (into_earlier_zeros, "x.new_zeros((8, 8), dtype=torch.{low})", "total ="),
        (into_fresh, "torch.zeros(8, 8, dtype=message.dtype)", "scatter_add_"),
        (into_one_given, "message.to(torch.float64)", "index_add_"),
    ],
)
def test_what_is_written_to_is_made_in_the_dtype_of_what_is_written(
    plan: str, call: Callable[[Net, Tensor], Any], write: str, at: str
) -> None:
    said = complaint(plan, call)
    write = write.format(low="float16" if "fp16" in plan else "bfloat16")
    assert f"No rule of a plan cures it: write {write} in line {line_of(call, at)};" in said
    tree = ast.parse("".join(linecache.getlines(__file__)))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == call.__name__)
    source = ast.unparse(function)
    for old in ("torch.zeros(8, 8)", "x.new_zeros((8, 8), dtype=torch.float32)", "message)"):
        if old in source:
            source = source.replace(old, write + (")" if old == "message)" else ""), 1)
            break
    scope = {"torch": torch, "Tensor": Tensor, "Net": Net}
    exec(source, scope)
    amp, model = prepared(plan, scope[call.__name__])
    with amp:
        model(X)


@pytest.mark.parametrize(
    ("plan", "call", "words"),
    [
        ("bf16-mixed", lambda self, x: self.layer(torch.arange(8)), "dtypes int64 and fp32 met in 'layer' (Linear), in linear"),
        ("bf16-mixed", lambda self, x: self.layer(torch.arange(8)), "write torch.arange(8).to(torch.float32)"),
        ("bf16-true", lambda self, x: self.layer(x.float()), "Region('layer', compute='fp32'); or write x.float().to(torch.bfloat16)"),
        ("bf16-mixed", lambda self, x: x.double() @ self.layer(x), "write x.double().to(torch.bfloat16)"),
        ("bf16-mixed", lambda self, x: functional.cross_entropy(self.layer(x), torch.arange(8).float()), "to(torch.int64)"),
        ("bf16-mixed", lambda self, x: torch.lerp(self.own(x), torch.ones(8, 8), 0.5), "by .to(torch.float32) or .to(other.dtype)"),
        ("bf16-mixed", lambda self, x: torch.lerp(*[self.layer(x), torch.ones(8, 8)], 0.5), "ops.lerp=widest or ops.lerp=lower"),
    ],
)  # fmt: skip
def test_the_line_and_the_dtype_to_write_are_named(
    plan: str, call: Callable[[Net, Tensor], Any], words: str
) -> None:
    said = complaint(plan, call)
    assert words in said
    assert f"in line {call.__code__.co_firstlineno}" in said
    assert ".to(torch." in said


def under_vmap(self: Net, x: Tensor) -> Tensor:
    def norm(row: Tensor) -> Tensor:
        low = self.layer(row)
        square = low[None] * low[:, None]
        return torch.linalg.matrix_norm(square, "nuc")

    return torch.func.vmap(torch.func.grad(norm))(x)


def test_a_norm_inside_of_transforms_is_tried_inside_of_vmap() -> None:
    said = complaint("bf16-master", under_vmap)
    assert f"write square.to(torch.float32) in line {line_of(under_vmap, 'matrix_norm')}" in said
    if "linalg_matrix_norm" in base_table("native", DEVICE):
        assert (
            "No rule of a plan cures it" in said
        )  # torch's own rule is applied below vmap, which is too late
        return
    assert "ops.linalg_matrix_norm=fp32" in said
    amp, model = prepared("bf16-master+ops.linalg_matrix_norm=fp32", under_vmap)
    with amp:
        assert model(X).isfinite().all()


def turned_off(self: Net, x: Tensor) -> Tensor:
    low = self.layer(x)
    with torch.autocast(DEVICE, enabled=False):
        return x @ low


def test_no_rule_is_advised_where_autocast_is_off() -> None:
    said = complaint("bf16-mixed", turned_off)
    assert (
        f"No rule of a plan cures it: write low.to(torch.float32) in line {line_of(turned_off, '@ low')}"
        in said
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda self, x: x.double() @ self.layer(x),
        lambda self, x: functional.cross_entropy(self.layer(x), torch.arange(8).float()),
        lambda self, x: torch.lerp(self.layer(x), torch.ones(8, 8), 0.5),
    ],
)
def test_a_default_device_hides_nothing(call: Callable[[Net, Tensor], Any]) -> None:
    """With a default device, torch calls each of its functions from a frame of its own."""

    def inside(self: Net, x: Tensor) -> Any:
        with torch.device(DEVICE):
            return call(self, x)

    amp, model = prepared("bf16-mixed", inside)
    with amp, torch.device("cpu"), pytest.raises((RuntimeError, TypeError)) as caught:
        model(X)
    said = str(caught.value).partition("\ncastwise: ")[2]
    assert re.search(r"write .*\.to\(torch\.(bfloat16|int64|float32)\)", said)
    assert said == complaint("bf16-mixed", call)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, enabled=False):
            return torch.lerp(self.frozen, x, 0.5)


def test_frozen_parameters_that_arrived_low_may_be_stored_wide() -> None:
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        model = Frozen()
        amp.prepare(model, torch.optim.SGD(model.layer.parameters(), 0.1))
        with pytest.raises(RuntimeError, match=r"by prepare\(\.\.\., widen='all'\)"):
            model(X)
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        model = Frozen()
        amp.prepare(model, torch.optim.SGD(model.layer.parameters(), 0.1), widen="all")
        model(X)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mv(x, self.angles)


def test_a_buffer_that_is_kept_wide_may_be_stored_low() -> None:
    amp, model = castwise.Amp("bf16-true", device=DEVICE), nn.Sequential(Table())
    amp.prepare(model)
    with amp, pytest.raises(RuntimeError, match=r"Region\('0', params='bf16'\)"):
        model(X)
    model = nn.Sequential(Table())
    with castwise.Amp("bf16-true+regions.0=params:bf16", device=DEVICE) as amp:
        amp.prepare(model)
        model(X)


# --- outside of the model, and in backward --------------------------------------------------------------------


def test_weights_that_are_used_outside_of_the_model_are_told() -> None:
    amp, model = prepared("bf16-master", lambda self, x: self.layer(x))
    hidden = model(X)
    with pytest.raises(RuntimeError) as caught, amp:
        functional.linear(hidden, model.layer.weight)
    said = str(caught.value)
    assert "dtypes fp32 and bf16 met outside of the model, in linear, test_complaints.py, line" in said
    assert "make this call inside `with amp.autocast():`; or write hidden.to(torch.bfloat16) in line" in said


def test_a_mismatch_that_is_none_of_the_models_business_is_left_alone() -> None:
    amp, _ = prepared("bf16-master", lambda self, x: self.layer(x))
    with pytest.raises(RuntimeError) as caught, amp:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16))
    assert "castwise" not in str(caught.value)


@pytest.mark.sparse
@pytest.mark.parametrize("plan", LOW[:2])
def test_a_backward_that_dtypes_fail_in_is_told_by_its_operator(plan: str) -> None:
    def product(self: Net, x: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(8).to_sparse(), self.layer(x))

    amp, model = prepared(plan, product)
    with amp:
        loss = model(X).sum()
        with pytest.raises(RuntimeError) as caught:
            amp.backward(loss)
    said = str(caught.value)
    assert "met in the backward of _sparse_addmm. To cure it add ops._sparse_addmm=widest" in said
    amp, model = prepared(f"{plan}+ops._sparse_addmm=widest", product)
    with amp:
        amp.backward(model(X).sum())
        assert model.layer.weight.grad is not None


@pytest.mark.sparse
def test_what_a_hook_brings_back_in_backward_is_not_brought_back_again() -> None:
    brought = []

    def product(self: Net, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda kept: kept, lambda kept: brought.append(1) or kept
        ):
            return torch.sparse.mm(torch.eye(8).to_sparse(), self.layer(x))

    counts = []
    for plan in ("bf16-mixed", "fp16-mixed"):
        amp, model = prepared(plan, product)
        with amp:
            loss = model(X).sum()
            brought.clear()
            with pytest.raises(RuntimeError, match=r"^expected scalar type Float but found (BFloat16|Half)$"):
                amp.backward(loss) if plan == "bf16-mixed" else loss.backward()
        counts.append(len(brought))
    assert counts[0] == counts[1]


# --- nothing is changed, and nothing is lost ------------------------------------------------------------------


def test_trying_leaves_everything_as_it_was() -> None:
    def call(self: Net, x: Tensor) -> Tensor:
        drawn = functional.dropout(self.layer(x), 0.5)
        return torch.lerp(self.norm(x), torch.bernoulli(torch.ones(8, 8) / 2), 0.5) + torch.lerp(
            drawn, x, 0.5
        )

    amp, model = prepared("bf16-mixed", call)
    with amp:
        model.layer.weight.grad = torch.ones(8, 8)
        before = copy.deepcopy(model.state_dict())
        torch.manual_seed(3)
        with pytest.raises(RuntimeError) as caught:
            model(X)
        after = torch.rand(3)
        assert "castwise: " in str(caught.value)
        torch.manual_seed(3)
        functional.dropout(torch.ones(8, 8, dtype=torch.bfloat16), 0.5)
        torch.bernoulli(torch.ones(8, 8) / 2)
        assert torch.equal(after, torch.rand(3))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(model.layer.weight.grad, torch.ones(8, 8))
        assert castwise.casting.frames.depth() == 0
        assert not torch.is_autocast_enabled(DEVICE)


def test_what_was_half_written_is_not_written_again() -> None:
    kept = torch.zeros(8, 8)

    def call(self: Net, x: Tensor) -> Tensor:
        return torch.lerp(kept.add_(1), self.layer(x), 0.5)

    assert "could not be repeated" in complaint("bf16-mixed", call)
    assert torch.equal(kept, torch.ones(8, 8))


@pytest.mark.cpu  # apply_ takes only CPU tensors
def test_a_users_function_that_an_operator_calls_is_not_called_again() -> None:
    seen = []

    def note(value: float) -> float:
        seen.append(value)
        raise TypeError("dtype float32")

    amp, model = prepared("bf16-mixed", lambda self, x: self.layer(x).detach().apply_(note))
    with amp, pytest.raises(TypeError):
        model(X)
    assert len(seen) == 1


def test_a_users_code_runs_once() -> None:
    amp, model = prepared("bf16-mixed", lambda self, x: torch.lerp(self.own(x), torch.ones(8, 8), 0.5))
    with amp, pytest.raises(RuntimeError, match="castwise: "):
        model(X)
    assert model.calls == 1


def test_a_custom_operator_is_not_called_again_where_other_ranks_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for call, tried in (
        (lambda self, x: same(self.layer(x), torch.ones(8, 8)), False),
        (lambda self, x: torch.lerp(self.layer(x), torch.ones(8, 8), 0.5), True),
    ):
        amp, model = prepared("bf16-mixed", call)
        with amp:
            with monkeypatch.context() as among:
                among.setattr(torch.distributed, "is_initialized", lambda: True)
                with pytest.raises((RuntimeError, TypeError)) as caught:
                    model(X)
            assert ("To cure it" in str(caught.value)) is tried


class Own(Tensor):
    """A tensor subclass that runs its own code."""

    ran = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.ran += getattr(function, "__name__", "") == "lerp"
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_call_on_tensors_with_code_of_their_own_is_not_made_again() -> None:
    said = complaint(
        "bf16-mixed", lambda self, x: torch.lerp(self.layer(x), torch.ones(8, 8).as_subclass(Own), 0.5)
    )
    assert "no cure was tried" in said
    assert Own.ran == 1


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_nobodys_mode_sees_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for said in (True, False):
        if not said:
            monkeypatch.setattr(complaints, "_add", lambda error, say: None)
        amp, model = prepared("bf16-mixed", lambda self, x: torch.lerp(self.layer(x), torch.ones(8, 8), 0.5))
        with amp, Watching() as mode, pytest.raises(RuntimeError):
            model(X)
        seen.append(mode.seen)
    assert seen[0] == seen[1]


def test_an_error_that_dtypes_have_no_part_in_stays_as_it_is() -> None:
    for call in (
        lambda self, x: self.layer(x) @ torch.ones(3, 3),
        lambda self, x: torch.linalg.cholesky(-torch.eye(3)),
        lambda self, x: int("one"),
        lambda self, x: self.layer(x)[99],
    ):
        amp, model = prepared("bf16-mixed", call)
        with amp, pytest.raises((RuntimeError, ValueError, IndexError)) as caught:
            model(X)
        assert "castwise" not in str(caught.value)


def test_the_error_survives_whatever_goes_wrong_in_explaining_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(cures, "failed_calls", broken)
    amp, model = prepared("bf16-mixed", into_zeros)
    with amp, pytest.raises(RuntimeError, match="must have the same scalar type"):
        model(X)


def test_it_says_so_where_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cures, "MOST_S", -1.0)
    said = complaint("bf16-mixed", lambda self, x: torch.lerp(self.layer(x), torch.ones(8, 8), 0.5))
    assert "There was no time to try cures: cast the operator's inputs in line" in said


def test_large_calls_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cures, "MOST_BYTES", 10)
    said = complaint("bf16-mixed", lambda self, x: torch.lerp(self.layer(x), torch.ones(8, 8), 0.5))
    assert "no cure was tried" in said


@pytest.fixture
def unreadable() -> Callable[[Net, Tensor], Any]:
    """Return a function whose source cannot be read."""
    scope: dict[str, Any] = {"torch": torch}
    exec(
        compile(
            "def call(self, x):\n    return torch.lerp(self.layer(x), torch.ones(8, 8), 0.5)\n",
            "<gone>",
            "exec",
        ),
        scope,
    )
    return scope["call"]


def test_code_that_cannot_be_read_is_told_by_its_line(unreadable: Callable[[Net, Tensor], Any]) -> None:
    said = complaint("bf16-mixed", unreadable)
    # torch 2.11 names the matrix's dtype first, torch 2.13 the vector's
    assert re.search(
        "dtypes (fp32 and bf16|bf16 and fp32) met in Net itself, <gone>, line 2, in call[.]", said
    )
    assert "cast the operator's inputs in line 2, by .to(torch.float32)" in said


def into_out(self: Net, x: Tensor) -> Tensor:
    into = torch.empty(8, 8)
    with torch.no_grad():
        torch.mm(self.layer(x), self.layer.weight, out=into)
    return into


def test_what_is_written_by_out_is_not_cast_into_a_copy() -> None:
    """Calls made without gradients are retried that way. With a cast copy as ``out``, the original tensor would stay
    empty.
    """
    for plan, cast in (
        ("bf16-mixed", "write self.layer(x).to(torch.float32) in"),
        ("bf16-true", "write torch.empty(8, 8, dtype=torch.bfloat16) in"),
    ):
        said = complaint(plan, into_out)
        assert cast in said
        assert "into.to(" not in said


class Unlike(torch.autograd.Function):
    """Keeps one factor low and the other in fp32, so its backward cannot multiply them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.mm(a, b.to(a.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, _ = ctx.saved_tensors
        return None, torch.mm(a.t(), grads[0].float())


def test_the_backward_of_somebodys_own_function_is_told_by_its_line() -> None:
    amp, model = prepared("bf16-mixed", lambda self, x: Unlike.apply(self.layer(x), self.layer.weight))
    with pytest.raises(RuntimeError, match="dtype") as caught:
        amp.backward(model(X).float().sum())
    line = line_of(Unlike.backward, "torch.mm")
    assert f"in backward, in mm, test_complaints.py, line {line}" in str(caught.value)
    assert f"write a.t().to(torch.float32) in line {line}" in str(caught.value)


def test_floating_values_are_made_whole_only_where_that_is_asked_for() -> None:
    assert ".to(torch.int64)" in complaint(
        "bf16-mixed", lambda self, x: functional.one_hot(self.layer(x).abs(), 9)
    )
    with pytest.raises((RuntimeError, TypeError)) as caught:
        prepared("bf16-mixed", lambda self, x: self.layer(x).numpy())[1](X)
    assert "int64" not in str(caught.value)


def of_their_own(self: Net, x: Tensor) -> Tensor:
    self.layer(x)
    raise ValueError("unsupported scalar type in the file: float32 or bfloat16")


def asserted(self: Net, x: Tensor) -> Tensor:
    assert self.layer(x) is None, "expected dtype Float"
    return x


@pytest.mark.parametrize("call", [of_their_own, asserted])
def test_what_somebody_raises_by_hand_is_left_alone(call: Callable[[Net, Tensor], Any]) -> None:
    """The error came from no operator, so its subject is unknown."""
    with pytest.raises((ValueError, AssertionError)) as caught:
        prepared("bf16-mixed", call)[1](X)
    assert "castwise" not in str(caught.value)
