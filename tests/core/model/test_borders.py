"""Regions: selected by pattern, stored and run in their own formats, in backward and in threads too."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import threading
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import castwise
from castwise import Plan, Region
from castwise.core.casting import frames, kernels
from castwise.core.model.resolve import assign
from castwise.errors import PatternError, PlanError
from tests.here import DEVICE
from tests.soak import each_value

X = torch.linspace(-1, 1, 64).reshape(8, 8)
LENGTH = torch.tensor([8], device="cpu")
"""The length of X as a sequence, on the CPU as torch requires."""


class Probe(nn.Module):
    """A layer that records its input dtype and the dtype it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[tuple[str, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z = torch.tanh(y)
        self.seen.append(tuple(str(t.dtype).removeprefix("torch.") for t in (x, y, z)))
        return z


class Net(nn.Module):
    """Two probes in sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = Probe(), Probe()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def prepare(model: nn.Module, plan: Plan) -> Any:
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model)
    return amp.close


# --- patterns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "want"),
    [
        ("a", {"a"}),
        ("*", {"a", "b"}),
        ("**.linear", {"a.linear", "b.linear"}),
        ("?.linear", {"a.linear", "b.linear"}),
        ("type:Probe", {"a", "b"}),
        ("type:Lin*", {"a.linear", "b.linear"}),
    ],
)
def test_patterns(pattern: str, want: set[str]) -> None:
    assert set(assign(Net(), [Region(pattern, compute="fp32")])) == want


def test_last_match_wins_and_bases_count() -> None:
    class Special(nn.BatchNorm2d):
        pass

    model = nn.Sequential(Special(3), nn.Linear(3, 3))
    first, last = Region("type:*", compute="fp32"), Region("type:BatchNorm*", params="fp32")
    assert assign(model, [first, last])["0"] is last
    assert assign(model, [last, first])["0"] is first


@pytest.mark.parametrize(
    ("model", "pattern", "words"),
    [
        (Net(), "encoder.*", "no module of Net matches"),
        (Net(), "c.linear", r"similar name: a.linear, b.linear"),
        (nn.TransformerEncoderLayer(8, 2), "self_attn.out_proj", "without calling it; name the attention"),
        (
            nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])),
            "0",
            "ModuleList is a container; name its children",
        ),
    ],
)
def test_patterns_that_cannot_work_are_refused(model: nn.Module, pattern: str, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        assign(model, [Region(pattern, compute="fp32")])


def test_type_pattern_that_reaches_out_proj_among_others_warns() -> None:
    with pytest.warns(UserWarning, match="does not reach self_attn.out_proj"):
        assign(nn.TransformerEncoderLayer(8, 2), [Region("type:Linear", compute="fp32")])


# --- borders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "a", "b"),
    [
        (Plan(compute="fp32"), ("float32",) * 3, ("float32",) * 3),
        (Plan(compute="bf16"), ("float32", "bfloat16", "bfloat16"), ("bfloat16",) * 3),
        (Plan(compute="bf16", regions={"b": "fp32"}), ("float32", "bfloat16", "bfloat16"), ("float32",) * 3),
        (Plan(compute="bf16", regions={"b": "fp16"}), ("float32", "bfloat16", "bfloat16"), ("float16",) * 3),
        (Plan(compute="bf16", regions={"b": "fp64"}), ("float32", "bfloat16", "bfloat16"), ("float64",) * 3),
        (Plan(compute="fp32", regions={"a": "bf16"}), ("bfloat16",) * 3, ("float32",) * 3),
        (
            Plan(compute="bf16", ops={"tanh": "fp32"}),
            ("float32", "bfloat16", "float32"),
            ("float32", "bfloat16", "float32"),
        ),
        (
            Plan(compute="bf16", params="compute", master="none", rules="none", regions={"b": "fp32"}),
            ("bfloat16",) * 3,
            ("float32",) * 3,
        ),
    ],
)
def test_regions_run_in_their_own_format(plan: Plan, a: tuple[str, ...], b: tuple[str, ...]) -> None:
    model = Net()
    remove = prepare(model, plan)
    with torch.autocast(DEVICE, dtype=torch.float16):  # an outer autocast has no effect
        out = model(X)
    assert (model.a.seen[0], model.b.seen[0]) == (a, b)
    assert out.dtype is torch.float32 or plan.regions[0].compute == "fp64"
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters())
    remove()
    assert not kernels.registered(DEVICE)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    note: str = "kept"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, 1),
        lambda x: [x, None],
        lambda x: {"x": x},
        lambda x: collections.OrderedDict(x=x),
        lambda x: Pair(x, 3),
        lambda x: Record(x),
        lambda x: nn.utils.rnn.pack_padded_sequence(x[None], LENGTH, batch_first=True),
        lambda x: {"deep": [Pair(x, 1)]},
    ],
)
def test_casts_go_through_containers_both_ways(wrap: Any) -> None:
    class Echo(nn.Module):
        def forward(self, value: Any, *, again: Any = None) -> Any:
            self.got = (value, again)
            return value

    def leaf(value: Any) -> torch.Tensor:
        found: list[torch.Tensor] = []
        from castwise.core.casting.trees import map_tensors

        map_tensors(lambda t: (found.append(t), t)[1], value)
        return found[0]

    model = nn.Sequential(Echo())
    prepare(model, Plan(compute="fp32", regions={"0": "bf16"}))
    value = wrap(X)
    out = model(value)
    assert type(out) is type(value)
    assert leaf(model[0].got[0]).dtype is torch.bfloat16
    assert leaf(out).dtype is torch.float32
    assert leaf(value).dtype is torch.float32  # the caller's object is unchanged
    model[0](value, again=value)
    assert leaf(model[0].got[1]).dtype is torch.bfloat16


class Bag(dict[str, torch.Tensor]):
    """A custom mapping."""


class Opaque:
    """Neither a container nor a dataclass."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def lazily(values: list[torch.Tensor]) -> Any:
    """Yield products that are computed only when requested."""
    for value in values:
        yield value @ value


OUTPUTS: dict[str, tuple[Any, Any, torch.dtype]] = {
    "tuple": (lambda x: (x @ x,), lambda out: out[0], torch.float32),
    "subclass of dict": (lambda x: Bag(x=x @ x), lambda out: out["x"], torch.float32),
    "dataclass": (lambda x: Record(x @ x), lambda out: out.x, torch.float32),
    "iterator": (lambda x: iter([x @ x]), next, torch.bfloat16),
    "reversed": (lambda x: reversed([x @ x]), next, torch.bfloat16),
    "object": (lambda x: Opaque(x @ x), lambda out: out.x, torch.bfloat16),
    "set": (lambda x: {x @ x}, lambda out: out.pop(), torch.bfloat16),
    # The plan is no longer in force when it is computed.
    "generator": (lambda x: lazily([x]), next, torch.float32),
}


@pytest.mark.parametrize(("make", "take", "want"), OUTPUTS.values(), ids=OUTPUTS.keys())
def test_what_a_model_returns_is_widened_where_it_can_be_looked_into(
    make: Any, take: Any, want: torch.dtype
) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return make(x)

    model = Model()
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(model, inference=True)
        later = isinstance(make(X), types.GeneratorType)
        with pytest.warns(UserWarning, match="returns a generator") if later else contextlib.nullcontext():
            out = model(X)
        assert type(out) is type(make(X))
        assert take(out).dtype is want


def test_a_generators_body_runs_outside_of_the_plan() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            low = x @ x
            return (value @ value for value in [x, low])

    model = Model()
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(model, inference=True)
        with pytest.warns(UserWarning, match="returns a generator: code of the model that it runs later"):
            out = model(X)
        assert [value.dtype for value in out] == [torch.float32, torch.bfloat16]
        assert frames.depth() == 0


def test_hugging_face_outputs_keep_their_type() -> None:
    transformers = pytest.importorskip("transformers", reason="checks Hugging Face's own output type")
    output_type = transformers.modeling_outputs.BaseModelOutput

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return output_type(last_hidden_state=x @ x)

    model = Model()
    prepare(model, Plan(compute="bf16"))
    out = model(X)
    assert isinstance(out, output_type)
    assert out.last_hidden_state.dtype is out["last_hidden_state"].dtype is torch.float32


def test_copies_of_a_prepared_model_run_the_same() -> None:
    model = Net()
    remove = prepare(model, Plan(compute="bf16", regions={"b": "fp32"}, ops={"tanh": "fp32"}))
    want = model(X)
    copies = [copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))]
    remove()
    assert "tanh" in kernels.registered(DEVICE)  # the override kernels are registered
    for other in copies:
        assert torch.equal(other(X), want)
    del other, copies
    assert not kernels.registered(DEVICE)


def test_state_is_restored_after_an_exception() -> None:
    model = Net()
    prepare(model, Plan(compute="bf16", regions={"b": "fp32"}))
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 3))
    assert frames.depth() == 0
    assert not torch.is_autocast_enabled(DEVICE)
    assert model(X).dtype is torch.float32


def test_an_interrupted_forward_is_left_at_the_next_step() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = nn.Sequential(Interrupted())
    prepare(model, Plan(compute="bf16"))
    with pytest.raises(KeyboardInterrupt):
        model(X)
    frames.leave_interrupted()
    assert frames.depth() == 0
    assert not torch.is_autocast_enabled(DEVICE)


def test_each_forward_is_a_scope_of_the_weight_cache() -> None:
    """A weight changed between two forwards inside one ambient region is used by the second."""
    model = Net()
    prepare(model, Plan(compute="bf16"))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        model(X)
        with torch.no_grad():
            model.a.linear.weight.zero_()
            model.b.linear.weight.zero_()
        out = model(X)
    assert torch.allclose(out, torch.tanh(model.b.linear.bias).expand_as(out), rtol=2**-7)


# --- storage ------------------------------------------------------------------------------------------------


def test_storage_follows_plan_and_regions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Linear(3, 3))
    plan = Plan(compute="bf16", params="compute", regions=[Region("type:_BatchNorm", params="fp32")])
    prepare(model, plan)
    assert {name: t.dtype for name, t in model.state_dict().items() if t.is_floating_point()} == {
        "0.weight": torch.bfloat16, "0.bias": torch.bfloat16, "1.weight": torch.float32, "1.bias": torch.float32,
        "1.running_mean": torch.float32, "1.running_var": torch.float32,
        "2.weight": torch.bfloat16, "2.bias": torch.bfloat16,
    }  # fmt: skip


def test_shared_parameter_takes_the_widest_storage() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    plan = Plan(compute="bf16", params="compute", master="none", regions={"1": "fp32"})
    prepare(model, plan)
    assert model[0].weight is model[1].weight
    assert model[0].weight.dtype is torch.float32


def test_weights_beyond_fp16_are_refused_and_tiny_ones_reported() -> None:
    plan = Plan(compute="fp16", params="compute")
    model = nn.Linear(4, 4).bfloat16()
    with torch.no_grad():
        model.weight[0, 0] = 1e6
    with pytest.raises(PlanError, match=r"weight \(largest 9\.994e\+05\)"):
        prepare(model, plan)
    assert model.weight.dtype is torch.bfloat16  # nothing was changed
    with torch.no_grad():
        model.weight.fill_(1e-9)
    with pytest.warns(UserWarning, match="become zero"):
        prepare(model, plan)


# --- mismatches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "make"),
    [
        ("LayerNorm", lambda: nn.LayerNorm(8)),
        ("Linear", lambda: nn.Linear(8, 8)),
        ("Conv1d", lambda: nn.Conv1d(8, 8, 1)),
    ],
)
def test_dtype_mismatch_names_the_module_both_dtypes_and_the_cure(layer: str, make: Any) -> None:
    class Widening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(make())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x.float())

    model = Widening()
    prepare(model, Plan(compute="bf16", params="compute", master="none", rules="none"))
    with pytest.raises(RuntimeError) as caught:
        model(X)
    text = str(caught.value)
    assert f"'block.0' ({layer})" in text
    assert "bf16" in text
    assert "fp32" in text
    assert "Region('block.0', compute='fp32')" in text


def test_other_errors_keep_their_words() -> None:
    model = Net()
    prepare(model, Plan(compute="bf16"))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(3, 3))
    assert "castwise" not in str(caught.value)


# --- backward and threads -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def whole_recomputation() -> Any:
    """Recompute each piece to its end, so that the record at the end is reached."""
    with set_checkpoint_early_stop(False):
        yield


class Checkpointed(nn.Module):
    """Checkpoints its own function, optionally inside a region, and records the dtypes of each run."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.inner, self.last = nn.Linear(8, 8), Inner(reentrant), nn.Linear(8, 8)
        self.runs: list[torch.dtype] = []

    def piece(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        self.runs.append(y.dtype)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.piece, x, use_reentrant=self.reentrant)
        return self.last(self.inner(y))


class Inner(nn.Module):
    """A region with a checkpoint inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.linear = nn.Linear(8, 8)
        self.runs: list[torch.dtype] = []

    def piece(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.runs.append(y.dtype)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.piece, x, use_reentrant=self.reentrant)


@each_value()
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", [None, "fp16", "fp32"])
@pytest.mark.parametrize("ambient", [False, True])
def test_recomputation_runs_by_the_plan(reentrant: bool, inner: str | None, ambient: bool) -> None:
    plan = Plan(compute="bf16", regions={"inner": inner} if inner else (), ops={"tanh": "fp32"})
    model = Checkpointed(reentrant)
    remove = prepare(model, plan)
    x = X.clone().requires_grad_()
    loss = model(x).sum()
    if ambient:
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss.backward()
    else:
        loss.backward()
    assert len(model.runs) == len(model.inner.runs) == 2
    assert model.runs[0] is model.runs[1] is torch.float32
    assert model.inner.runs[0] is model.inner.runs[1] is torch.float32
    remove()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_with_checkpoint_equal_those_without(reentrant: bool) -> None:
    plan = Plan(compute="bf16", regions={"inner": "fp16"}, ops={"tanh": "fp32"})
    grads = []
    for use in (True, False):
        model = Checkpointed(reentrant)
        if not use:
            model.forward = lambda x, m=model: m.last(m.inner(m.piece(x)))  # type: ignore[method-assign]
            model.inner.forward = model.inner.piece  # type: ignore[method-assign]
        remove = prepare(model, plan)
        model(X.clone().requires_grad_()).sum().backward()
        grads.append([p.grad for p in model.parameters()])
        remove()
    for with_checkpoint, without in zip(*grads, strict=True):
        assert torch.equal(with_checkpoint, without)


def test_backward_of_another_model_does_not_inherit_the_plan() -> None:
    planned, plain = Checkpointed(False), Checkpointed(False)
    remove = prepare(planned, Plan(compute="bf16", ops={"tanh": "fp32"}))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        other = plain(X.clone().requires_grad_()).sum()
    planned(X.clone().requires_grad_()).sum().backward()
    other.backward()
    assert plain.runs == [torch.bfloat16, torch.bfloat16]
    assert planned.runs == [torch.float32, torch.float32]
    remove()


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning"
)  # reentrant checkpoints cause it
def test_nested_checkpoints() -> None:
    class Nested(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.model = Checkpointed(reentrant)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.model, x, use_reentrant=self.model.reentrant)

    for reentrant in (False, True):
        model = Nested(reentrant)
        remove = prepare(model, Plan(compute="bf16", ops={"tanh": "fp32"}))
        model(X.clone().requires_grad_()).sum().backward()
        assert set(model.model.runs) == set(model.model.inner.runs) == {torch.float32}
        assert len(model.model.runs) >= 3
        remove()


def test_threads_that_run_a_prepared_module_run_it_by_the_plan() -> None:
    """Replicas of one module run in threads at the same time, as in DataParallel."""
    model = Net()
    remove = prepare(model, Plan(compute="bf16", regions={"b": "fp32"}, ops={"tanh": "fp32"}))
    want = model(X)
    barrier = threading.Barrier(4)
    results: dict[int, torch.Tensor] = {}

    def worker(index: int) -> None:
        replica = model._replicate_for_data_parallel()
        replica._modules = model._modules
        barrier.wait(10)
        with torch.autocast(DEVICE, enabled=False):  # DataParallel re-enters the caller's autocast state
            for _ in range(20):
                results[index] = replica(X)

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[i], want) for i in range(4))
    remove()


@pytest.mark.skipif(DEVICE == "sim", reason="torch's DataParallel scatters to CUDA devices only")
def test_data_parallel_runs_a_prepared_module() -> None:
    model = Net()
    remove = prepare(model, Plan(compute="bf16", ops={"tanh": "fp32"}))
    assert torch.equal(nn.DataParallel(model)(X), model(X))
    remove()


# --- what borders round -------------------------------------------------------------------------------------


class Head(nn.Module):
    """A body, a norm and a head, each with values that bf16 and fp16 would round."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


WITH_REGIONS = [
    "bf16-mixed+regions.{0}=fp32", "fp16-mixed+regions.{0}=fp32", "bf16-master+regions.{0}=fp32",
    "bf16-true+regions.{0}=fp32", "fp16-true+regions.{0}=fp32", "O2+regions.{0}=fp32", "O1+regions.{0}=fp32",
]  # fmt: skip


@each_value()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("line", WITH_REGIONS)
def test_an_fp32_head_gives_fp32_logits(line: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model = Head()
    seen: list[torch.Tensor] = []
    with castwise.Amp(line.format("head"), device=DEVICE) as amp:
        amp.prepare(model)
        model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        run = torch.compile(model, backend="aot_eager") if compiled else model
        logits = run(X)
        want = nn.functional.linear(seen[-1].float(), model.head.weight, model.head.bias)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, want, rtol=1e-6, atol=1e-6)  # bf16 would be off by 2**-9
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("line", WITH_REGIONS)
def test_neighbouring_fp32_regions_hand_fp32_on(line: str) -> None:
    model = Head()
    plan = Plan.parse(line.format("norm") + "+regions.head=fp32")
    left, entered = [], []
    model.norm.register_forward_hook(lambda _, args, out: left.append(out.detach().clone()))
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model)
        model.head.register_forward_pre_hook(lambda _, args: entered.append(args[0].detach().clone()))
        model(X).sum().backward()
    assert left[0].dtype is entered[0].dtype is torch.float32
    assert torch.equal(left[0], entered[0])


def test_what_was_written_to_a_rounded_output_counts() -> None:
    class Model(Head):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return self.head(self.norm(self.body(x)).mul_(0))

    with castwise.Amp("bf16-true+regions.norm=fp32+regions.head=fp32", device=DEVICE) as amp:
        model = Model()
        amp.prepare(model)
        assert torch.equal(model(X), model.head.bias.expand(8, 4))


@pytest.mark.parametrize("line", ["fp16-true", "O2", "fp16-mixed", "fp16-master", "naive"])
def test_a_loss_kept_in_fp32_does_not_become_infinite_on_its_way_out(line: str) -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1e6 * x.square().mean()

    class Model(Head):
        def __init__(self) -> None:
            super().__init__()
            self.loss = Loss()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            out = super().forward(x)
            return {"loss": 0.5 * self.loss(out), "out": out}

    with castwise.Amp(f"{line}+regions.loss=fp32", device=DEVICE) as amp:
        model = Model()
        amp.prepare(model)
        out = model(X)
        assert out["loss"].isfinite()
        assert out["loss"].item() > 65504


@pytest.mark.parametrize("line", ["bf16-mixed", "bf16-master", "bf16-true"])
def test_a_region_in_the_format_around_it_casts_side_inputs(line: str) -> None:
    class Side(nn.Module):
        def forward(self, x: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, side.dtype))
            return x + side

    class Model(Head):
        def __init__(self) -> None:
            super().__init__()
            self.side = Side()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.side(super().forward(x), torch.ones(4))

    seen: list[tuple[torch.dtype, torch.dtype]] = []
    with castwise.Amp(f"{line}+regions.side=bf16", device=DEVICE) as amp:
        model = Model()
        amp.prepare(model)
        model(X)
    assert seen == [(torch.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize("inside", ["fp64", "fp16"])
def test_formats_that_operators_around_refuse_leave_in_fp32(inside: str) -> None:
    dtypes = []
    with castwise.Amp(f"bf16-mixed+regions.norm={inside}", device=DEVICE) as amp:
        model = Head()
        amp.prepare(model)
        model.head.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
        model(X).sum().backward()
    assert dtypes == [torch.float32]


@pytest.mark.parametrize("line", ["bf16-mixed", "fp16-mixed"])
def test_an_lstm_that_onednn_lacks_runs_low_by_torchs_own_kernels(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.autocast requests a oneDNN primitive that a CPU without AVX-512 lacks for bf16; none exists yet for fp16."""
    monkeypatch.setattr(castwise.core._torch.cpu, "cpu_has_bf16", lambda: False)
    torch.manual_seed(0)
    model, x = nn.LSTM(6, 4, batch_first=True), torch.randn(3, 5, 6)
    exact = model(x)[0]
    castwise.Amp(line, device=DEVICE).prepare(model)
    out = model(x)[0]
    out.float().sum().backward()
    off = (out.float() - exact).abs().max()
    assert 0.0 < off < {"bf16": 2e-2, "fp16": 2e-3}[Plan.parse(line).compute]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
