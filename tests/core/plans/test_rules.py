"""Operator tables compared with the kernels of the installed torch, and overrides on top of them.

The behavior of native kernels is observed, not assumed: a spy is registered right below an operator's autocast key, the
operator is called with made-up arguments, and the spy reports the dtypes that arrive. Fake tensors stand in for devices
that this machine lacks; the autocast kernels are the same code.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library

import castwise
from castwise.core import _torch
from castwise.core.casting import kernels
from castwise.core.devices import autocast_types
from castwise.core.plans import rules, tables
from castwise.core.plans.rules import (
    BASES,
    RULES,
    Row,
    base_table,
    describe,
    operator_overloads,
    overrides,
)
from castwise.errors import PlanError, UnknownNameError

FP32, BF16 = torch.float32, torch.bfloat16
DEVICE_TYPES = autocast_types()
WATCHED = [device for device in DEVICE_TYPES if device != "mtia"]
"""Devices where a spy can be put below the autocast key. torch's parser does not know MTIA's autograd key."""

# --- what native kernels do ---------------------------------------------------------------------------------


class Arrived(Exception):
    """Carries the arguments that reached the spy."""


def spy(*args: object, **kwargs: object) -> None:
    raise Arrived(args, kwargs)


def made_up_arguments(
    op: _torch.operators.OpOverload, tensors: Iterator[torch.Tensor]
) -> tuple[list[object], dict[str, object]]:
    """Return arguments of the types in the schema; no kernel computes with them."""
    values: dict[str, object] = {
        "int": 1, "float": 1.0, "number": 1.0, "bool": False, "str": "dimname::x", "List[int]": [1], "List[bool]":
        [True], "List[str]": ["dimname::x"],
    }  # fmt: skip
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if "Tensor" in kind:
            value: object = [next(tensors), next(tensors)] if "List" in kind else next(tensors)
        elif argument.has_default_value():
            break
        else:
            value = None if kind.startswith("Optional") else values[kind]
            if argument.name == "weight_stride0":
                value = 3  # the weights of a recurrent layer without biases
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def arriving_dtypes(
    op: _torch.operators.OpOverload, device: str, dtypes: Sequence[torch.dtype]
) -> list[torch.dtype]:
    """Return the dtypes that arrive below a device's autocast key: of the tensors, then of a dtype argument, which
    decides.
    """
    tensors = (torch.empty(2, 2, dtype=dtypes[i % len(dtypes)], device=device) for i in range(32))
    args, kwargs = made_up_arguments(op, tensors)
    library = Library("aten", "IMPL")
    spied = {op}
    if op._schema.name == "aten::norm":  # torch forwards it to the overloads that take a dtype
        spied |= {torch.ops.aten.norm.ScalarOpt_dtype, torch.ops.aten.norm.ScalarOpt_dim_dtype}
    try:
        with warnings.catch_warnings():
            # Hides "overriding a previously registered kernel", which is intended.
            warnings.simplefilter("ignore", UserWarning)
            for overload in spied:
                library.impl(overload, spy, f"Autograd{device.upper()}", allow_override=True)
        torch.set_autocast_dtype(device, BF16)
        torch.set_autocast_enabled(device, True)
        op(*args, **kwargs)
    except Arrived as arrived:
        found: list[torch.dtype] = []
        for value in (*arrived.args[0], *arrived.args[1].values()):
            if isinstance(value, torch.dtype):
                found.append(value)
            elif isinstance(value, torch.Tensor):
                found.append(value.dtype)
            elif isinstance(value, (list, tuple)) and op._schema.name != "aten::index_put":
                # The list of index_put contains indices, which keep their dtype.
                found += [item.dtype for item in value if isinstance(item, torch.Tensor)]
        return found
    finally:
        torch.set_autocast_enabled(device, False)
        library._destroy()
    raise AssertionError(f"{op} never reached the spy")


def observed_rule(op: _torch.operators.OpOverload, device: str) -> str:
    """Return the rule that explains the dtypes an operator's inputs are cast to."""
    try:
        low, wide, mixed = (
            arriving_dtypes(op, device, dtypes) for dtypes in ((BF16,), (FP32,), (FP32, BF16))
        )
    except RuntimeError as error:
        return "banned" if "unsafe to autocast" in str(error) else f"raises {error}"
    # Operators with a dtype argument (softmax and sum on CUDA) are not cast; autocast sets the argument.
    fp32 = [
        set(dtypes) == {FP32} or (dtypes[0] == BF16 and dtypes[-1] == FP32) for dtypes in (low, wide, mixed)
    ]
    if all(fp32):
        return "fp32"
    if set(low) == set(wide) == set(mixed) == {BF16}:
        return "lower"
    if set(low) == {BF16} and set(wide) == set(mixed) == {FP32}:
        return "widest"
    return f"{low} {wide} {mixed}"


def overload_of(name: str) -> _torch.operators.OpOverload:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


@pytest.mark.parametrize("device", DEVICE_TYPES)
def test_native_table_lists_exactly_what_torch_has_registered(device: str) -> None:
    registered = {
        name.removeprefix("aten::").partition(".")[0]
        for name in _torch.dispatcher.autocast_registrations(device)
    }
    table = base_table("native", device)
    # "native" is for operators that the tables do not list.
    assert {op for op, row in table.items() if row.rule == "native"} == set()
    assert registered - set(table) == set()
    # The cuDNN layer has an autocast kernel only in CUDA builds.
    assert set(table) - registered <= ({"_cudnn_rnn"} if device == "cuda" else set())


def test_an_operator_of_a_newer_torch_is_cast_by_torchs_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``reflection_pad1d`` removed from the tables, every base table treats it as it treats the operators it
    lists.
    """
    older = tuple(
        dataclasses.replace(group, ops=" ".join(op for op in group.ops.split() if op != "reflection_pad1d"))
        for group in tables.CPU
    )
    monkeypatch.setattr(tables, "CPU", older)
    base_table.cache_clear()
    rules._overrides.cache_clear()
    try:
        row = describe("native", "cpu")[-1]
        assert (row.op, row.rule) == ("reflection_pad1d", "native")
        assert row.reason == "castwise's tables do not list it, and torch.autocast casts it on this device"
        assert overrides("native", (), "cpu") == {}
        x = torch.ones(1, 1, 4, dtype=BF16)
        got = {}
        for line in (
            "bf16-mixed",
            "bf16-mixed+rules=apex",
            "bf16-mixed+ops.reflection_pad1d=as_is",
            "bf16-mixed+ops.exp=fp32",
        ):
            with castwise.autocast(line, device_type="cpu"):
                got[line] = torch.nn.functional.pad(x, (1, 1), mode="reflect").dtype
        assert list(got.values()) == [FP32, BF16, BF16, FP32]
    finally:
        base_table.cache_clear()
        rules._overrides.cache_clear()


@pytest.mark.parametrize("device", WATCHED)
def test_native_table_says_what_every_registered_kernel_does(device: str) -> None:
    table = base_table("native", device)
    wrong = {}
    with FakeTensorMode():
        for name in sorted(_torch.dispatcher.autocast_registrations(device)):
            if ".names_" in name:  # torch 2.11 looks up the names of dimensions before it casts
                continue
            if (
                name == "aten::_cudnn_rnn" and not torch.cuda.is_available()
            ):  # it packs weights before it casts
                continue
            op = overload_of(name)
            observed, listed = observed_rule(op, device), table[op._schema.name.removeprefix("aten::")].rule
            if observed != listed:
                wrong[name] = (observed, listed)
    assert wrong == {}


def test_the_spy_leaves_nothing_behind() -> None:
    with FakeTensorMode():
        assert observed_rule(torch.ops.aten.mm.default, "cpu") == "lower"
    a = torch.eye(3)
    assert torch.mm(a, a).dtype is FP32
    with torch.autocast("cpu", BF16):
        assert torch.mm(a, a).dtype is BF16


def test_the_spy_tells_an_unlisted_operator_from_every_rule() -> None:
    with FakeTensorMode():
        assert observed_rule(torch.ops.aten.add.Tensor, "cpu") not in RULES
        assert observed_rule(torch.ops.aten.pow.Tensor_Tensor, "cpu") not in RULES
        assert observed_rule(torch.ops.aten.pow.Tensor_Tensor, "cuda") == "fp32"


CPU_CALLS: dict[str, Any] = {
    "conv1d": lambda x: torch.conv1d(x(1, 2, 4), x(2, 2, 3)),
    "conv2d": lambda x: torch.conv2d(x(1, 2, 4, 4), x(2, 2, 3, 3)),
    "conv_transpose2d": lambda x: torch.conv_transpose2d(x(1, 2, 4, 4), x(2, 2, 3, 3)),
    "linear": lambda x: torch.nn.functional.linear(x(2, 4), x(3, 4), x(3)),
    "matmul": lambda x: x(2, 4) @ x(4, 3),
    "mm": lambda x: torch.mm(x(2, 4), x(4, 3)),
    "bmm": lambda x: torch.bmm(x(2, 2, 4), x(2, 4, 3)),
    "addmm": lambda x: torch.addmm(x(3), x(2, 4), x(4, 3)),
    "baddbmm": lambda x: torch.baddbmm(x(3), x(2, 2, 4), x(2, 4, 3)),
    "prelu": lambda x: torch.prelu(x(4), x(1)),
    "scaled_dot_product_attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x(1, 2, 4), x(1, 2, 4), x(1, 2, 4)
    ),
    "binary_cross_entropy": lambda x: torch.nn.functional.binary_cross_entropy(
        x(4).sigmoid(), x(4).sigmoid()
    ),
    "mse_loss": lambda x: torch.nn.functional.mse_loss(x(4), x(4)),
    "cross_entropy_loss": lambda x: torch.nn.functional.cross_entropy(x(2, 4), torch.tensor([0, 3])),
    "prod": lambda x: torch.prod(x(4)),
    "trace": lambda x: torch.trace(x(3, 3)),
    "cdist": lambda x: torch.cdist(x(2, 3), x(2, 3)),
    "quantile": lambda x: torch.quantile(x(4), 0.5),
    "avg_pool3d": lambda x: torch.nn.functional.avg_pool3d(x(1, 1, 4, 4, 4), 2),
    "reflection_pad1d": lambda x: torch.nn.functional.pad(x(1, 1, 4), (1, 1), mode="reflect"),
    "linalg_inv": lambda x: torch.linalg.inv(x(3, 3) + 9 * torch.eye(3)),
    "grid_sampler": lambda x: torch.nn.functional.grid_sample(
        x(1, 1, 4, 4), x(1, 2, 2, 2), align_corners=True
    ),
    "cat": lambda x: torch.cat([x(2), x(2)]),
    "stack": lambda x: torch.stack([x(2), x(2)]),
}


@pytest.mark.parametrize("op", CPU_CALLS)
def test_results_under_cpu_autocast_come_in_the_format_the_table_says(op: str) -> None:
    expected = {"lower": (BF16, BF16), "fp32": (FP32, FP32), "widest": (FP32, BF16)}
    with torch.autocast("cpu", BF16):
        results = tuple(
            CPU_CALLS[op](lambda *shape, dtype=dtype: torch.rand(shape).to(dtype)).dtype
            for dtype in (FP32, BF16)
        )
    assert results == expected[base_table("native", "cpu")[op].rule]


@pytest.mark.parametrize("op", ["exp", "softmax", "layer_norm", "sum", "log", "pow", "add"])
def test_operators_without_a_row_keep_their_inputs_format_on_the_cpu(op: str) -> None:
    assert op not in base_table("native", "cpu")
    calls: dict[str, Any] = {
        "exp": torch.exp,
        "softmax": lambda x: torch.softmax(x, 0),
        "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
        "sum": torch.sum,
        "log": torch.log,
        "pow": lambda x: x**2,
        "add": lambda x: x + x,
    }
    with torch.autocast("cpu", BF16):
        assert calls[op](torch.rand(4, dtype=BF16)).dtype is BF16
        assert calls[op](torch.rand(4)).dtype is FP32


# --- tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICE_TYPES)
@pytest.mark.parametrize("base", BASES)
def test_every_row_is_complete_and_governs_an_operator(base: str, device: str) -> None:
    for op, row in base_table(base, device).items():
        assert row.op == op
        assert row.rule in RULES
        assert row.reason
        assert row.opaque
        assert not (row.only_low and row.rule != "banned")
        assert operator_overloads(op)
        rules.check_rule(op, row.rule)


def test_describe_lists_the_table_by_rule_and_name() -> None:
    rows = describe("cuda", "cpu")
    assert {row.op: row for row in rows} == base_table("cuda", "cpu")
    assert list(rows) == sorted(rows, key=lambda row: (RULES.index(row.rule), row.op))
    assert describe("none", "cpu") == ()


def test_cuda_table_is_the_same_on_every_device_up_to_the_kernels_of_one() -> None:
    cuda = base_table("cuda", "cuda")
    for device in ("cpu", "xpu", "mps"):
        there = base_table("cuda", device)
        assert {op for op in cuda if op not in there} == tables.CUDA_ONLY
        assert {op for op in there if op not in cuda} == {
            "gru",
            "lstm",
            "mkldnn_rnn_layer",
            "rnn_relu",
            "rnn_tanh",
        }
        assert all(there[op] == cuda[op] for op in there if op in cuda)


@pytest.mark.parametrize(
    ("op", "rule", "only_low"),
    [
        ("matmul", "lower", False),
        ("lstm", "lower", False),
        ("softmax", "fp32", False),
        ("gelu", "fp32", False),
        ("cross_entropy_loss", "fp32", False),
        ("add", "widest", False),
        ("cat", "widest", False),
        ("binary_cross_entropy", "banned", True),
        ("exp_", "banned", True),
        ("pow_", "banned", True),
        ("einsum", "as_is", False),
        ("cov", "as_is", False),
        ("affine_grid_generator", "as_is", False),
    ],
)
def test_apex_table_has_the_lists_of_o1(op: str, rule: str, only_low: bool) -> None:
    row = base_table("apex", "cpu")[op]
    assert (row.rule, row.only_low) == (rule, only_low)


@pytest.mark.parametrize("op", ["relu", "batch_norm", "mean", "add_", "log1p"])
def test_apex_table_leaves_the_rest_alone(op: str) -> None:
    assert op not in base_table("apex", "cpu")


def test_rows_of_operators_that_this_torch_lacks_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    group = tables.Group("lower", "from a release to come", "mm operator_of_torch_9")
    monkeypatch.setattr(tables, "APEX", (group,))
    assert list(base_table.__wrapped__("apex", "cuda")) == ["mm"]


def test_tables_are_read_only() -> None:
    with pytest.raises(TypeError):
        base_table("native", "cpu")["exp"] = Row("exp", "fp32", "")  # type: ignore[index]


@pytest.mark.parametrize(
    ("base", "device", "said"),
    [
        (
            "cudda",
            "cpu",
            "no such base table 'cudda' (did you mean 'cuda'?). Allowed: native, cuda, apex, none.",
        ),
        (
            "native",
            "cpus",
            "no such device type 'cpus' (did you mean 'cpu'?). Allowed: cpu, cuda, xpu, mps, mtia.",
        ),
    ],
)
def test_unknown_base_or_device_type(base: str, device: str, said: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        base_table(base, device)
    assert str(error.value) == f"base_table({base!r}, {device!r}): {said}"


# --- overrides ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICE_TYPES)
def test_nothing_to_override_where_torch_does_it_already(device: str) -> None:
    assert overrides("native", (), device) == {}
    assert overrides("none", (), device) == {}
    assert overrides("cuda", (), "cuda") == {}
    native = tuple((op, row.rule) for op, row in base_table("native", device).items())
    assert overrides("native", native, device) == {}


@pytest.mark.parametrize("device", DEVICE_TYPES)
@pytest.mark.parametrize("base", BASES)
def test_overrides_on_top_of_native_amount_to_the_base_table(base: str, device: str) -> None:
    """The native table with the overrides applied gives each operator the rule of the base table."""
    native, wanted = base_table("native", device), base_table(base, device)
    rows = overrides(base, (("neg", "fp32"),), device)  # ops is not empty, so "none" turns autocast on
    effective = {op: row.rule for op, row in native.items()} | {op: row.rule for op, row in rows.items()}
    for op in effective.keys() | wanted.keys():
        expected = "fp32" if op == "neg" else wanted[op].rule if op in wanted else "as_is"
        assert effective.get(op, "as_is") == expected, op
    for op, row in rows.items():
        assert op not in native or (row.rule, row.only_low) != (native[op].rule, native[op].only_low), op


def test_cuda_on_a_cpu() -> None:
    rows = overrides("cuda", (), "cpu")
    assert rows["exp"].rule == rows["layer_norm"].rule == rows["softmax"].rule == "fp32"
    assert rows["binary_cross_entropy"].rule == "banned"
    assert not rows["binary_cross_entropy"].only_low
    assert "mm" not in rows  # lower in both tables
    # CUDA does not list it, so its parts are looked up: log_softmax and nll_loss run in fp32.
    assert (rows["cross_entropy_loss"].rule, rows["cross_entropy_loss"].opaque) == ("as_is", False)


def test_a_ban_can_become_an_fp32_island() -> None:
    rows = overrides("native", (("binary_cross_entropy", "fp32"),), "cuda")
    assert {op: row.rule for op, row in rows.items()} == {"binary_cross_entropy": "fp32"}
    assert overrides("cuda", (("binary_cross_entropy", "fp32"),), "cpu").get("binary_cross_entropy") is None


def test_none_with_ops_turns_the_native_table_off_but_for_them() -> None:
    rows = overrides("none", (("mm", "lower"), ("exp", "fp32")), "cpu")
    assert "mm" not in rows  # native casts it already
    assert rows["exp"].rule == "fp32"
    rest = {op: row for op, row in rows.items() if op != "exp"}
    assert rest.keys() == base_table("native", "cpu").keys() - {"mm"}
    assert all(row.rule == "as_is" and row.opaque for row in rest.values())


def test_as_is_matters_for_an_unlisted_operator_only_if_its_parts_are_cast() -> None:
    assert overrides("native", (("einsum", "as_is"),), "cpu")["einsum"].opaque  # calls bmm, which is lower
    assert overrides("native", (("relu", "as_is"), ("exp_", "as_is")), "cpu") == {}


@pytest.mark.parametrize("device", DEVICE_TYPES)
def test_what_apex_leaves_whole_is_overridden_on_every_device(device: str) -> None:
    """Includes operators whose parts are not visible: linalg_matrix_exp and affine_grid_generator multiply inside their
    kernels.
    """
    rows = overrides("apex", (), device)
    for op in ("affine_grid_generator", "cov", "linalg_matrix_exp", "linalg_pinv", "linalg_svd", "logsumexp"):
        assert (rows[op].rule, rows[op].opaque) == ("as_is", True), op


def test_a_later_pair_wins_and_the_aten_prefix_is_taken_off() -> None:
    rows = overrides("native", [("exp", "lower"), ("aten::exp", "fp32")], "cpu")
    assert {op: row.rule for op, row in rows.items()} == {"exp": "fp32"}


def test_in_place_operators_can_be_banned_but_not_cast() -> None:
    assert overrides("native", (("exp_", "banned"),), "cpu")["exp_"].rule == "banned"
    with pytest.raises(
        PlanError, match=r"an in-place operator keeps its tensor's format.*Allowed: as_is, banned"
    ):
        overrides("native", (("exp_", "fp32"),), "cpu")


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("exq", "did you mean 'eq' or 'exp'"),
        ("cross_entropy", "torch.nn.functional.cross_entropy runs as cross_entropy_loss: name that instead"),
        (
            "no_such_lib::op",
            "nothing is registered under 'no_such_lib'. Import the library that registers it first",
        ),
    ],
)
def test_unknown_operator(op: str, said: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        overrides("native", ((op, "fp32"),), "cpu")
    assert f"operator {op!r}: not registered in torch {torch.__version__}" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize("op", ["torch.exp", "exp.out", "", "a b", "x::y::z", "exp\n"])
def test_what_is_no_operator_name(op: str) -> None:
    with pytest.raises(PlanError, match=r"is not an operator name\. Allowed: an ATen base name"):
        rules.check_rule(op, "fp32")


def test_unknown_rule() -> None:
    with pytest.raises(
        UnknownNameError, match=r"ops=\('exp', 'fp23'\): no such rule 'fp23' .did you mean 'fp32'"
    ):
        rules.check_rule("exp", "fp23")


def test_functions_named_in_the_help_are_no_operators_and_run_as_ones_that_are() -> None:
    for function, runs_as in tables.FUNCTIONS.items():
        assert hasattr(torch.nn.functional, function)
        assert not hasattr(torch.ops.aten, function), function
        for word in runs_as.replace(",", " ").split():
            assert word in {"and", "or", "so", "on", "depending", "mode"} or operator_overloads(word)


# --- overloads ----------------------------------------------------------------------------------------------


def test_overloads_of_a_plain_name_take_tensors_and_write_nothing() -> None:
    names = {overload._overloadname for overload in operator_overloads("pow")}
    assert names == {"Tensor_Tensor", "Tensor_Scalar", "Scalar"}
    assert {overload._overloadname for overload in operator_overloads("sum")} >= {"default", "dim_IntList"}


def test_overloads_of_an_in_place_name_write_to_their_first_argument() -> None:
    assert [str(overload) for overload in operator_overloads("exp_")] == ["aten.exp_.default"]
    assert {overload._overloadname for overload in operator_overloads("add_")} == {"Tensor", "Scalar"}


def test_operators_that_write_to_several_arguments_have_no_rule() -> None:
    with pytest.raises(PlanError, match="every overload of it writes to its arguments or takes no tensor"):
        operator_overloads("_fused_adam_")


@contextmanager
def custom_operator(definition: str) -> Iterator[None]:
    library = Library("castwise_test_rules", "DEF")
    try:
        library.define(definition)
        yield
    finally:
        library._destroy()


def test_custom_operators_are_found_once_their_library_is_there() -> None:
    name = "castwise_test_rules::twice"
    with pytest.raises(UnknownNameError, match=r"Import the library that registers it first"):
        overrides("native", ((name, "fp32"),), "cpu")
    with custom_operator("twice(Tensor x) -> Tensor"):
        assert overrides("native", ((name, "fp32"),), "cpu")[name].rule == "fp32"
        assert [overload.name() for overload in operator_overloads(name)] == [name]
        with pytest.raises(
            UnknownNameError, match=r"did you mean 'twice'\?\); 'castwise_test_rules' has twice"
        ):
            overrides("native", (("castwise_test_rules::twise", "fp32"),), "cpu")


def test_custom_operators_that_only_write_are_refused() -> None:
    with (
        custom_operator("fill(Tensor(a!) x) -> ()"),
        pytest.raises(PlanError, match="no rule applies to it"),
    ):
        overrides("native", (("castwise_test_rules::fill", "lower"),), "cpu")


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_where_tables_are_kept_no_operator_that_torch_casts_is_cast_unasked(device_type: str) -> None:
    rows = rules.meetings(device_type)
    native = rules.base_table("native", device_type)
    assert {op for op, row in native.items() if row.rule != "widest"} <= rows.keys()
    # Factorisations have no low-precision kernels.
    low_kernels = {op: row for op, row in rows.items() if row.rule != "fp32"}
    assert all(row.only_low or row.rule in ("as_is", "widest") for row in low_kernels.values())
    assert rows.keys() - low_kernels.keys() <= rules.stored_low("none", device_type).keys()
    kernels.Lease(rows, device_type).close()


def test_a_rule_for_any_operator_is_taken_or_refused_in_words() -> None:
    """Some operators have overloads that torch declares but never registers, such as ``index_put_.hacked_twin``."""
    names = {
        name.removeprefix("aten::").partition(".")[0] for name in _torch.operators.operator_names("aten")
    }
    for name in names:
        with suppress(PlanError):
            overrides("native", [(name, "as_is")], "cpu")
