"""Plans under torch.compile: in the traced graph, in Dynamo's guards and in the cache keys."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import castwise
from castwise import Plan
from castwise.core._torch.release import RELEASE
from castwise.core.casting import frames
from castwise.core.casting.trees import cast_floating, tensors_in
from castwise.core.plans.formats import get_format
from tests.fresh import run_interpreter, run_python
from tests.here import DEVICE
from tests.soak import each_value, pairs

pytestmark = [
    # Inductor uses torch.jit, and Dynamo reads .grad of the input of a resumed frame; both warn.
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

X = torch.linspace(-1, 1, 64).reshape(8, 8)
P = Plan(compute="bf16", ops={"sigmoid": "fp32"})
Q = Plan(compute="bf16")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert frames.depth() == 0


def function(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(torch.nn.functional.linear(x, x))


class Net(nn.Module):
    """Two layers with an optional graph break."""

    def __init__(self, graph_break: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.graph_break = graph_break

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.a(x))
        if self.graph_break:
            torch._dynamo.graph_break()
        return torch.sigmoid(self.b(y))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_each_plan_gives_its_own_result_on_one_compiled_function(backend: str) -> None:
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    p, q = castwise.autocast(P, device_type=DEVICE), castwise.autocast(Q, device_type=DEVICE)
    for _ in range(2):
        with p:
            assert compiled(X).dtype is torch.float32
        with q:
            assert compiled(X).dtype is torch.bfloat16
        torch.testing.assert_close(compiled(X), function(X))
        assert compiled(X).dtype is torch.float32


def test_region_inside_a_compiled_function() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with castwise.autocast("bf16-mixed+ops.sigmoid=fp32", device_type=DEVICE):
            y = x @ x
            z = torch.sigmoid(y)
        return y, z, x @ x

    assert [t.dtype for t in inside(X)] == [torch.bfloat16, torch.float32, torch.float32]


PLANS = {
    "native": Plan(compute="bf16"),
    "override": P,
    "region": Plan(compute="bf16", regions={"b": "fp32"}),
    "region+override": Plan(compute="bf16", regions={"b": "fp16"}, ops={"sigmoid": "fp32"}),
    "stored low": Plan(compute="bf16", params="compute", master="none", rules="none"),
}


@each_value()
@pytest.mark.parametrize(
    ("name", "graph_break", "how"),
    [
        (name, graph_break, how)
        for (name, graph_break), how in pairs(
            list(itertools.product(PLANS, [False, True])), ["module", "in function", "module.compile()"]
        )
    ],
)
def test_prepared_module_compiles_as_it_runs(name: str, graph_break: bool, how: str) -> None:
    model, plan = Net(graph_break), PLANS[name]
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model)
    want = model(X)
    want.sum().backward()
    grad = model.a.weight.grad.clone()
    model.zero_grad()
    options = {"backend": "aot_eager", "fullgraph": not graph_break}
    if how == "module":
        run = torch.compile(model, **options)
    elif how == "in function":
        run = torch.compile(lambda x: model(x), **options)
    else:
        model.compile(**options)
        run = model
    for _ in range(2):
        model.zero_grad()
        got = run(X)
        got.sum().backward()
        assert torch.equal(got, want)
        # Backward sums bf16 products in another order: a bf16 ulp (2**-8) or two of the largest gradient.
        torch.testing.assert_close(model.a.weight.grad, grad, rtol=0, atol=float(2**-6 * grad.abs().max()))
    assert frames.depth() == 0
    assert not torch.is_autocast_enabled(DEVICE)
    amp.close()


def _backward_of(run: Any, x: torch.Tensor) -> list[torch.dtype]:
    """Return the formats of the matrix products in the backward graph that AOTAutograd traces."""
    found: list[torch.dtype] = []

    def forward(graph: torch.fx.GraphModule, _: object) -> Any:
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, _: object) -> Any:
        products = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        found.extend(node.meta["val"].dtype for node in products)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    run(torch.compile, backend)(x).float().sum().backward()
    return found


SETTINGS = ["same_as_forward", "off"]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("line", "formats"),
    [
        ("bf16-mixed", ["bf16", "bf16", "bf16"]),
        ("bf16-mixed+regions.b=fp32", ["fp32", "fp32", "bf16"]),
        ("bf16-mixed+ops.mm=fp32", ["bf16", "bf16", "bf16"]),  # eager mode runs backward outside of autocast
    ],
)
def test_backward_of_a_prepared_module_is_that_of_eager_mode(
    setting: str, line: str, formats: list[str]
) -> None:
    """The setting for autocast in backward changes nothing. By default, torch would run the backward of an fp32
    region in bf16.
    """
    eager, model = Net(), Net()
    with castwise.Amp(line, device=DEVICE) as plain, castwise.Amp(line, device=DEVICE) as amp:
        plain.prepare(eager)
        amp.prepare(model)
        eager(X).sum().backward()
        for _ in range(2):  # the reset in between drops the compiled code and castwise's callbacks
            torch._dynamo.reset()
            model.zero_grad()
            with torch._functorch.config.patch(backward_pass_autocast=setting):
                got = _backward_of(lambda compile, backend: compile(model, backend=backend), X)
                assert torch._functorch.config.backward_pass_autocast == setting
            assert got == [get_format(name).dtype for name in formats]
            for one, other in zip(model.parameters(), eager.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)


def test_backward_of_a_region_is_fp32_after_a_call_inside_a_block_of_the_user() -> None:
    """The graph compiled by a call inside the user's autocast block is used again outside of it."""
    eager, model = Net(), Net()
    line = "bf16-mixed+regions.b=fp32"
    with castwise.Amp(line, device=DEVICE) as plain, castwise.Amp(line, device=DEVICE) as amp:
        plain.prepare(eager)
        amp.prepare(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        for one in (eager, compiled):
            with torch.autocast(DEVICE, torch.bfloat16):
                inside = one(X)
            inside.sum().backward()
            one(X).sum().backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("setting", SETTINGS)
def test_backward_of_a_block_is_as_torch_is_told(setting: str) -> None:
    model = Net()
    block = castwise.autocast("bf16-mixed+ops.mm=fp32", device_type=DEVICE)

    def run(compile: Any, backend: Any) -> Any:
        compiled = compile(model, backend=backend)

        def inside(x: torch.Tensor) -> torch.Tensor:
            with block:
                return compiled(x)

        return inside

    with torch._functorch.config.patch(backward_pass_autocast=setting):
        got = _backward_of(run, X)
    assert got == [torch.bfloat16 if setting == "off" else torch.float32] * 3


def _cached_in(folder: Path) -> dict[str, str]:
    """Return environment variables that make Inductor keep its caches in the given folder."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # no vector instructions or precompiled headers: a new folder would have to compile them first
        "TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }  # fmt: skip


@pytest.mark.inductor
@pytest.mark.slow
def test_second_process_on_the_same_cache_is_not_affected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan's cached casts must not reach a process without castwise or with another plan, nor the reverse.

    The processes are forks of one that has imported Inductor, because the import takes longer than the rest of the
    test.
    """
    code = """
        import os, sys, traceback
        import torch, torch._inductor.compile_fx
        x = torch.linspace(-1, 1, 64, dtype=torch.bfloat16).reshape(8, 8)
        def plan():
            import castwise
            return castwise.autocast(castwise.Plan(compute="bf16", ops={"linear": "fp32"}), device_type="cpu")
        def other():
            import castwise
            return castwise.autocast(castwise.Plan(compute="bf16", ops={"log": "fp32"}), device_type="cpu")
        def plain():
            return torch.autocast("cpu", dtype=torch.bfloat16)
        def run(make):
            f = torch.compile(lambda x: torch.nn.functional.linear(x, x))
            with make():
                dtype = f(x).dtype
            hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
            print(make.__name__, dtype, hits, "castwise" in sys.modules, flush=True)
        for make in (plan, other, plain, plan, plain):
            if os.fork() == 0:
                try:
                    run(make)
                except BaseException:
                    traceback.print_exc()
                os._exit(0)
            os.wait()
    """
    for name, value in _cached_in(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert run_python(textwrap.dedent(code), tmp_path).splitlines() == [
        "plan torch.float32 0 True",
        "other torch.bfloat16 0 True",
        "plain torch.bfloat16 0 False",
        "plan torch.float32 1 True",  # the same plan does hit the cache
        "plain torch.bfloat16 1 False",
    ]


@pytest.mark.inductor
@pytest.mark.slow
def test_trainings_by_two_plans_in_processes_with_one_cache_are_each_plans_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes with different plans share one cache, and each trains by its own plan.

    Compiled graphs are stored on disk with their autocast. The key of a graph contains the plan.
    """
    code = """
        import hashlib, os, sys, traceback
        import torch, torch._inductor.compile_fx
        def digest(tensors):
            return hashlib.sha256(b"".join(t.detach().float().numpy().tobytes() for t in tensors)).hexdigest()[:12]
        def same(eager, compiled):  # Inductor of torch 2.11 adds the gradient of an fp32 bias in another order
            return all(a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(eager, compiled))
        class Net(torch.nn.Sequential):  # torch's own classes are compiled hooks and all, and not stored then
            def forward(self, x):
                return self[1](self[0](x))
        def run(line):
            import castwise
            torch.manual_seed(0)
            model = Net(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
            found = []
            with castwise.Amp(line + "+output=as_is", device="cpu") as amp:
                amp.prepare(model)
                for module in (model, torch.compile(model)):
                    model.zero_grad()
                    out = module(torch.linspace(-1, 1, 64).reshape(8, 8))
                    out.float().pow(2).sum().backward()
                    found.append([out, *(p.grad for p in model.parameters())])
            counts = torch._dynamo.utils.counters["aot_autograd"]
            hits, saved = counts["autograd_cache_hit"], counts["autograd_cache_saved"]
            print(line, digest(found[0]), same(*found), hits, saved)
        lines = "bf16-mixed", "bf16-mixed+ops.linear=fp32", "fp16-mixed", "bf16-mixed+regions.1=fp32"
        for line in (*lines, *lines[::-1]):
            if os.fork() == 0:
                try:
                    run(line)
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(0)
            os.wait()
    """
    for name, value in _cached_in(tmp_path).items():
        monkeypatch.setenv(name, value)
    said = [line.split() for line in run_python(textwrap.dedent(code), tmp_path).splitlines()]
    assert len(said) == 8
    assert len({digest for _, digest, *_ in said}) == 4  # each plan computes different values
    assert all(same == "True" for _, _, same, *_ in said)  # compiled equals eager
    stored = [
        line[3:] for line in said if "regions" not in line[0]
    ]  # torch stores no graph that contains castwise's calls
    assert stored == [["0", "1"]] * 3 + [["1", "0"]] * 3


def test_keys_of_the_caches_hold_a_block_only_while_it_is_compiled() -> None:
    """The cache key contains a plan only while code under that plan is compiled.

    A Dynamo reset drops the callbacks. If the key stayed, code without a plan would get the plan's graphs afterwards.
    """
    keys: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        keys.append(torch.compiler.config.cache_key_tag)
        return graph.forward

    before = torch.compiler.config.cache_key_tag
    for plan in ("bf16", "fp16", "bf16-mixed+ops.linear=fp32", "bf16-mixed+ops.sigmoid=fp32"):
        torch._dynamo.reset()
        function = torch.compile(lambda x: x @ x, backend=backend)
        with castwise.autocast(plan, device_type=DEVICE):
            function(X)
        assert torch.compiler.config.cache_key_tag == before
    assert len(set(keys)) == (3 if RELEASE >= (2, 13) else 4)  # torch 2.13 itself distinguishes bf16 and fp16


def test_a_failed_trace_leaves_no_state() -> None:
    def bad(x: torch.Tensor) -> torch.Tensor:
        with castwise.autocast("bf16", device_type=DEVICE):
            y = x @ x
            torch._dynamo.graph_break()
            return y

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(bad, fullgraph=True, backend="aot_eager")(X)
    assert not torch.is_autocast_enabled(DEVICE)
    assert torch.compile(bad, backend="aot_eager")(X).dtype is torch.bfloat16  # without fullgraph it runs


def test_guard_codes_are_dynamos_business_alone() -> None:
    """Entering a region changes Dynamo's global guard, and leaving it restores the guard."""
    guard = torch._C._dynamo.guards.GlobalStateGuard()
    region = castwise.autocast(P, device_type=DEVICE)
    other = castwise.autocast(
        Plan(compute="bf16", ops={"sigmoid": "as_is", "log": "fp32"}), device_type=DEVICE
    )
    with region:
        inside = torch._C._dynamo.guards.GlobalStateGuard()
        assert not guard.check()
        with other:
            assert not inside.check()
        assert inside.check()
    assert guard.check()


def test_a_plan_made_inside_a_compiled_function_is_carried_out() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with castwise.autocast(Plan(compute="fp16", ops=(("sigmoid", "fp32"),)), device_type=DEVICE):
            low = x @ x
            return low, torch.sigmoid(low)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert [t.dtype for t in compiled(X)] == [t.dtype for t in run(X)] == [torch.float16, torch.float32]


def test_casts_through_containers_are_traced() -> None:
    def run(x: torch.Tensor) -> Any:
        return cast_floating({"a": [x * 2], "n": 1}, torch.float32)

    out = torch.compile(run, fullgraph=True, backend="aot_eager")(X.bfloat16())
    assert out["a"][0].dtype is torch.float32


@dataclasses.dataclass
class Fields:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Named(NamedTuple):
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Checked(collections.OrderedDict[str, Any]):
    """A mapping whose own code has what Dynamo cannot compile by itself."""

    def __init__(self, logits: torch.Tensor, hidden: tuple[torch.Tensor, ...]) -> None:
        super().__init__(logits=logits, hidden=hidden)

    def __setitem__(self, key: str, value: Any) -> None:
        assert key in tuple(name for name in ("logits", "hidden"))
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(value for value in self.values())


@pytest.mark.parametrize("way", ["module", "in function", "module.compile()"])
@pytest.mark.parametrize("kind", [Fields, Frozen, Named, Checked, dict])
def test_containers_of_the_user_pass_a_compiled_models_border(kind: Any, way: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 8)

        def forward(self, given: Any) -> Any:
            y = self.layer(given["logits"] if isinstance(given, dict) else given.logits)
            return kind(logits=y, hidden=(y, y.softmax(-1)))

    model = Model().eval().bfloat16().float()  # so that close() restores its values
    amp = castwise.Amp(Plan(compute="bf16", params="compute", master="none", rules="none"), device=DEVICE)
    amp.prepare(model, inference=True)
    given = kind(logits=X, hidden=(X,))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        want = model(given)
        options: dict[str, Any] = {"backend": "eager", "fullgraph": True}
        if way == "module.compile()":
            model.compile(**options)
            got = model(given)
        else:
            got = torch.compile(model if way == "module" else lambda x: model(x), **options)(given)
    assert type(got) is kind
    assert [tensor.dtype for tensor in tensors_in(got)] == [torch.float32] * 3
    assert all(map(torch.equal, tensors_in(got), tensors_in(want)))
    amp.close()


# --- autocast objects made outside of what is compiled -------------------------------------------------------

FP16 = Plan(compute="fp16", ops={"sigmoid": "fp32", "sin": "lower"})


class Holder(nn.Module):
    """Enters a region that it holds."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self.amp_ctx = region

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        with self.amp_ctx:
            inside = [x @ x, torch.sigmoid(x @ x), torch.sin(x)]
        return [*inside, x @ x]


def ways(region: Any) -> dict[str, Any]:
    def enters(x: torch.Tensor) -> list[torch.Tensor]:
        with region:
            inside = [x @ x, torch.sigmoid(x @ x), torch.sin(x)]
        return [*inside, x @ x]

    @region
    def decorated(x: torch.Tensor) -> list[torch.Tensor]:
        return [x @ x, torch.sigmoid(x @ x), torch.sin(x)]

    def calls(x: torch.Tensor) -> list[torch.Tensor]:
        return [*decorated(x), x @ x]

    def again(x: torch.Tensor) -> list[torch.Tensor]:
        with region:
            y = x @ x
            with region:
                y = torch.sigmoid(y)
            return [y, x @ x]

    def mixed(x: torch.Tensor) -> list[torch.Tensor]:
        out = decorated(x)
        with region, torch.autocast(DEVICE, enabled=False), region:
            for _ in range(2):
                out += [*decorated(x), x @ x]
        return [*out, x @ x]

    return {"enters": enters, "decorated": calls, "attribute": Holder(region), "again": again, "mixed": mixed}


WAYS = ["enters", "decorated", "attribute", "again", "mixed"]
OUTSIDE = {"override": P, "native": Q, "fp16": FP16, "fp32": "fp32"}


@each_value()
@pytest.mark.parametrize(
    ("way", "name", "backend"),
    [
        *((way, name, "aot_eager") for way in WAYS for name in OUTSIDE),
        *(
            pytest.param(way, name, "inductor", marks=pytest.mark.inductor)
            for way, name in pairs(WAYS, OUTSIDE)
        ),
    ],
)
def test_a_region_made_outside_compiles_inside(way: str, name: str, backend: str) -> None:
    run = ways(castwise.autocast(OUTSIDE[name], device_type=DEVICE))[way]
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    want = run(X)
    for _ in range(2):
        got = compiled(X)
        assert [t.dtype for t in got] == [t.dtype for t in want]
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
    assert not torch.is_autocast_enabled(DEVICE)


def test_a_native_region_inside_an_override_and_the_reverse() -> None:
    native, override = castwise.autocast(Q, device_type=DEVICE), castwise.autocast(P, device_type=DEVICE)
    by_torch = torch.autocast(DEVICE, dtype=torch.bfloat16)

    def nested(x: torch.Tensor) -> list[torch.Tensor]:
        low = x.bfloat16()
        with override:
            with native:
                a = torch.sigmoid(low)
            b = torch.sigmoid(low)
        with by_torch, override:
            c = torch.sigmoid(low)
        with native:
            return [a, b, c, torch.sigmoid(low)]

    compiled = torch.compile(nested, fullgraph=True, backend="aot_eager")
    dtypes = [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert [t.dtype for t in nested(X)] == dtypes
    assert [t.dtype for t in compiled(X)] == dtypes
    with override:
        assert [t.dtype for t in compiled(X)] == dtypes


def test_subclasses_keep_their_overrides() -> None:
    class Mine(castwise.autocast):
        """A user's subclass of the region."""

    region = Mine(P, device_type=DEVICE)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def inside(x: torch.Tensor) -> torch.Tensor:
        with region:
            return torch.sigmoid(x @ x)

    assert inside(X).dtype is torch.float32


def test_another_instance_under_the_same_name_is_noticed() -> None:
    model = Holder(castwise.autocast(P, device_type=DEVICE))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert compiled(X)[1].dtype is torch.float32
    model.amp_ctx = castwise.autocast(Q, device_type=DEVICE)
    assert compiled(X)[1].dtype is torch.bfloat16


def test_a_native_region_is_in_the_graph_as_torchs_is() -> None:
    """A region that torch's autocast can express is traced as torch's own, while no live plan needs overrides."""
    region, called = castwise.autocast(Q, device_type=DEVICE), []

    def look(graph: torch.fx.GraphModule, _: object) -> Any:
        called.append({node.target for node in graph.graph.nodes})
        return graph.forward

    def inside(x: torch.Tensor) -> torch.Tensor:
        with region:
            return x @ x

    torch.compile(inside, backend=look)(X)
    override = castwise.autocast(P, device_type=DEVICE)
    torch.compile(lambda x: inside(x) + 1, backend=look)(X)
    del override
    assert [torch.amp.autocast_mode._enter_autocast in targets for targets in called] == [True, False]


def test_a_graph_break_inside_a_native_region_is_as_in_torch() -> None:
    region = castwise.autocast(Q, device_type=DEVICE)

    def breaks(x: torch.Tensor) -> torch.Tensor:
        with region:
            y = x @ x
            torch._dynamo.graph_break()
            return y @ x

    def breaks_twice_inside(x: torch.Tensor) -> torch.Tensor:
        with region, region:
            y = x @ x
            torch._dynamo.graph_break()
            return y @ x

    assert torch.compile(breaks, backend="aot_eager")(X).dtype is torch.bfloat16
    assert torch.compile(breaks_twice_inside, backend="aot_eager")(X).dtype is torch.bfloat16


def test_a_native_region_that_is_made_before_dynamo_is_loaded(tmp_path: Path) -> None:
    code = """
        import sys, torch, castwise
        region = castwise.autocast("bf16", device_type="cpu")
        assert "torch._dynamo" not in sys.modules
        def run(x):
            with region, region:
                return x @ x
        print(torch.compile(run, fullgraph=True, backend="aot_eager")(torch.ones(2, 2)).dtype)
    """
    assert run_interpreter(textwrap.dedent(code), tmp_path) == "torch.bfloat16\n"
