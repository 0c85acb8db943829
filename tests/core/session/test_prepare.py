"""If prepare fails, nothing has changed; close restores exactly what was there before."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise import Plan
from castwise.core import masters
from castwise.core.casting import frames, kernels
from castwise.core.masters import state
from castwise.core.plans.plan import PRESETS
from castwise.errors import DeviceError, PlanError, StateError
from tests.here import DEVICE
from tests.soak import each_value, every

NAMES = [name for name in PRESETS if name != "tf32"]
MASTERS = ["bf16-master", "fp16-master", "O2", "naive"]


class Net(nn.Module):
    """A convolution, a BatchNorm, a frozen layer and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.frozen, self.last = nn.Linear(16, 8).requires_grad_(False), nn.Linear(8, 2)
        self.register_buffer("table", torch.rand(1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(self.norm(self.conv(x)).flatten(1) + self.table)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


X = torch.rand(4, 3, 4, 4)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.01, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, eps=1e-3),
    "fused": lambda params: torch.optim.AdamW(params, fused=True, eps=1e-3),
}


def photograph(model: nn.Module, *optimizers: torch.optim.Optimizer, values: bool = True) -> dict[str, Any]:
    """Return everything about a model and its optimizers that prepare may change."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
    )
    return {
        "tensors": {
            key: (id(t), t.dtype, t.stride(), t.requires_grad and t.grad_dtype, t.clone() if values else None)
            for key, t in tensors.items()
        },
        "modules": [
            (sorted(vars(m)), [len(getattr(m, hook)) for hook in hooks], type(m)) for m in model.modules()
        ],
        "groups": [
            [
                ({k: v for k, v in g.items() if k != "params"}, [id(p) for p in g["params"]])
                for g in o.param_groups
            ]
            for o in optimizers
        ],
        "defaults": [dict(o.defaults) for o in optimizers],
        "attributes": [
            {key: len(value) if key.endswith("hooks") else None for key, value in vars(o).items()}
            for o in optimizers
        ],
        "state": [
            {
                id(p): {
                    k: (v.dtype, v.clone()) if isinstance(v, torch.Tensor) and values else None
                    for k, v in s.items()
                }
                for p, s in o.state.items()
            }
            for o in optimizers
        ],
        "kernels": kernels.registered(DEVICE),
        "autocast": torch.is_autocast_enabled(DEVICE),
        "settings": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        "masters": [masters.master_of(p) is not None for p in model.parameters()],
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def train(amp: castwise.Amp, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        amp.backward(1e-2 * model(X).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()


# --- refused ------------------------------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """An Optimizer that never calls Optimizer.__init__, like many wrappers."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


REFUSED: dict[str, tuple[Any, str]] = {
    "no fused kernel": (DeviceError, "no fused kernel"),
    "a weight beyond fp16": (PlanError, "65504"),
    "a typo in methods": (StateError, "no method of that name; it has encode"),
    "a bad second optimizer": (StateError, "holds no parameter of this Net"),
    "no optimizer": (StateError, "not a torch.optim.Optimizer"),
    "a wrapper": (StateError, "does not call Optimizer.__init__"),
}


@each_value(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_prepare_leaves_everything_as_it_was(why: str, name: str) -> None:
    plan = Plan.parse(f"{name}+fp32_matmul=ieee")
    model = Net()
    optimizer: Any = OPTIMIZERS["sgd"](model.parameters())
    others: tuple[Any, ...] = ()
    methods: tuple[str, ...] = ()
    if why == "no fused kernel":
        plan = Plan.parse(f"{plan}+optimizer=fused")
        others = (torch.optim.RMSprop(model.parameters()),)
    elif why == "a weight beyond fp16":
        if plan.compute != "fp16" or not plan.stores_low:
            pytest.skip("the plan stores nothing in fp16")
        with torch.no_grad():
            model.last.weight[0, 0] = 1e5
    elif why == "a typo in methods":
        methods = ("encod",)
    elif why == "a bad second optimizer":
        others = (torch.optim.SGD(nn.Linear(2, 2).parameters()),)
    elif why == "no optimizer":
        others = (object(),)
    elif not (plan.loss_scale or (plan.stores_low and plan.keeps_masters)):
        pytest.skip("the plan does not need hooks on optimizers")
    else:
        others = (Wrapper(torch.optim.SGD(model.parameters())),)
    watched = [
        o for o in (optimizer, *others) if isinstance(o, torch.optim.Optimizer) and not isinstance(o, Wrapper)
    ]
    before, want = photograph(model, *watched), copy.deepcopy(model)(X)
    amp = castwise.Amp(plan, device=DEVICE)
    error, text = REFUSED[why]
    for _ in range(2):  # nothing was changed, so the second call fails for the same reason
        with pytest.raises(error, match=text):
            amp.prepare(model, optimizer, *others, methods=methods)
        assert same(photograph(model, *watched), before)
    assert torch.equal(copy.deepcopy(model)(X), want)
    amp.close()
    assert same(photograph(model, *watched), before)


@each_value()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["install", "store", "attach", "fuse", "note"])
def test_a_prepare_that_is_interrupted_is_taken_back(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from castwise.core.session import amp as session
    from castwise.core.session import apply as applied

    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    optimizer.step()
    before = photograph(model, optimizer)

    owner, attribute = {
        "install": (applied.borders, "install"),
        "store": (applied.storage, "follow_state"),
        "attach": (applied.masters, "attach"),
        "fuse": (applied, "fuse"),
        "note": (session.wrappers, "on_ddp"),
    }[where]
    if where == "attach" and Plan.preset(name).master == "none":
        pytest.skip("the plan attaches no masters")
    original, calls = getattr(owner, attribute), []

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:  # only once, because undoing the changes also calls this
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    amp = castwise.Amp(Plan.parse(f"{name}+optimizer=fused+memory_format=channels_last"), device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            amp.prepare(model, optimizer)
            amp.close()  # the plan never calls this
    assert same(photograph(model, optimizer), before)
    amp.prepare(model, optimizer)
    train(amp, model, optimizer)
    amp.close()


@pytest.mark.parametrize("name", [*MASTERS, "bf16-true"])
def test_parameters_that_cannot_be_stored_otherwise_are_refused_in_words(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expanded = nn.Sequential(nn.Linear(4, 4))
    expanded[0].bias = nn.Parameter(torch.zeros(1).expand(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for broken, text in (
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), "1.weight is on the meta device"),
        (expanded, "0.bias is expanded"),
        (nn.Sequential(nn.LazyLinear(4)), "0.weight, 0.bias of this Sequential have no shape yet"),
    ):
        optimizer = torch.optim.SGD(broken.parameters(), 0.1)
        amp = castwise.Amp(name, device=DEVICE)
        dtypes = [p.dtype for p in broken.parameters()]
        with pytest.raises(StateError, match=text):
            amp.prepare(broken, optimizer)
        assert [p.dtype for p in broken.parameters()] == dtypes
        assert not broken._forward_hooks


@pytest.mark.parametrize("name", MASTERS)
def test_fp64_is_never_cast(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    before = copy.deepcopy(model.state_dict())
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        assert model[1].weight.dtype is torch.float64
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# --- closed -------------------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_close_undoes_exactly_what_prepare_did(name: str, kind: str) -> None:
    """Without a step, the weights are bitwise the original ones; after steps, their fp32 values."""
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    preset, fused = Plan.preset(name), "+optimizer=fused"
    if preset.master == "none":  # trained weights are permanently rounded
        fused = "" if kind == "sgd" and preset.stores_low else fused  # refused, see test_fused
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(Plan.preset(name).compute_dtype))
    before = photograph(model, optimizer)
    plan = Plan.parse(f"{name}+memory_format=channels_last{fused}+fp32_matmul=ieee")
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer, methods=("encode",))
        assert not same(photograph(model, optimizer), before)
    after = photograph(model, optimizer)
    for key in before.keys() - {"state"}:
        assert same(after[key], before[key]), key
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        train(amp, model, optimizer)
        frozen = amp.model_state_dict(model)["frozen.weight"].clone()
        trained = {key: value.clone() for key, value in amp.model_state_dict(model).items()}
    assert torch.equal(frozen, before["tensors"]["frozen.weight"][-1])
    before, after = (
        {
            key: [t[:-1] for t in shot["tensors"].values()],
            "rest": [shot[k] for k in ("modules", "groups", "defaults")],
        }
        for key, shot in (("tensors", before), ("tensors", photograph(model, optimizer)))
    )
    assert same(after, before)
    for key, value in model.state_dict().items():
        assert torch.equal(value, trained[key]), key


@every(3, 1)
@pytest.mark.parametrize("name", NAMES)
def test_inference_weights_come_back(name: str) -> None:
    model = Net().eval()
    before, want = photograph(model), model(X)
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model, inference=True, keep_originals=True)
        with torch.inference_mode():
            model(X)
    assert same(photograph(model), before)
    assert torch.equal(model(X), want)


@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-true", "O2"])
def test_weights_that_were_rounded_for_inference_stay_rounded_and_that_is_said(name: str) -> None:
    model = Net().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    amp = castwise.Amp(name, device=DEVICE)
    amp.prepare(model, inference=True)
    low = {key: value.clone() for key, value in model.state_dict().items()}
    given = amp.model_state_dict(model)
    with pytest.raises(StateError, match="keep_originals=True"):
        amp.change("fp32")
    with pytest.warns(UserWarning, match="were rounded for inference.*keep_originals=True"):
        amp.close()
    assert any(not torch.equal(before[key].float(), low[key].float()) for key in before)
    for key, value in model.state_dict().items():
        assert value.dtype is before[key].dtype
        assert torch.equal(value.float(), low[key].float()), key
        assert torch.equal(given[key].float(), low[key].float()), key


def test_weights_that_rounding_does_not_change_come_back_in_silence() -> None:
    model = Net().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    before = photograph(model)
    with castwise.Amp("bf16-true", device=DEVICE) as amp:
        amp.prepare(model, inference=True)
        amp.change("fp32")
    assert same(photograph(model), before)


def test_originals_are_kept_for_inference_alone() -> None:
    with castwise.Amp("bf16-true", device=DEVICE) as amp, pytest.raises(PlanError, match="inference=True"):
        amp.prepare(Net(), keep_originals=True)


@pytest.mark.parametrize("stage", ["_enter", "_take_in"])
def test_a_preparation_for_inference_that_fails_has_rounded_nothing(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net().eval()
    before = photograph(model)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(castwise.Amp, stage, fails)
    with pytest.raises(RuntimeError, match="planted"):
        castwise.Amp("bf16-true", device=DEVICE).prepare(model, inference=True)
    assert same(photograph(model), before)


def test_an_interrupt_while_weights_are_rounded_says_which_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    store, calls = castwise.core.masters.store, itertools.count()

    def interrupted(tensor: Tensor, dtype: torch.dtype) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        store(tensor, dtype)

    monkeypatch.setattr(castwise.core.masters, "store", interrupted)
    with (
        pytest.warns(UserWarning, match=r"^0\.weight, 0\.bias of Sequential were rounded"),
        pytest.raises(KeyboardInterrupt),
    ):
        castwise.Amp("bf16-true", device=DEVICE).prepare(model, inference=True)
    assert castwise.Amp.of(model) is None
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for key in ("1.weight", "1.bias"):
        assert torch.equal(model.state_dict()[key], before[key])


def test_preparing_for_inference_takes_no_second_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Former values are freed before the next parameters are converted."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    kept = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    alive: list[int] = []
    store = castwise.core.masters.store

    def counted(tensor: Tensor, dtype: torch.dtype) -> None:
        alive.append(sum(ref() is not None for ref in kept))
        store(tensor, dtype)

    monkeypatch.setattr(castwise.core.masters, "store", counted)
    castwise.Amp("bf16-true", device=DEVICE).prepare(model, inference=True)
    assert alive == list(range(12, 0, -1))


def test_a_collected_session_gives_its_settings_up() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    model = Net()
    castwise.Amp("bf16-mixed+fp32_matmul=ieee", device=DEVICE).prepare(model)
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"  # type: ignore[attr-defined]
    del model
    gc.collect()
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]
    with castwise.Amp(
        "fp32+fp32_matmul=bf16" if DEVICE == "cpu" and castwise.core._torch.cpu.cpu_has_bf16() else "fp32",
        device=DEVICE,
    ) as amp:
        amp.prepare(Net())


@pytest.mark.parametrize("name", MASTERS)
def test_a_close_that_is_interrupted_can_be_finished(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    amp = castwise.Amp(name, device=DEVICE)
    amp.prepare(model, optimizer)
    train(amp, model, optimizer)
    trained = {key: value.clone() for key, value in amp.model_state_dict(model).items()}
    from castwise.core.masters import attachment

    calls, release = [], attachment.release

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return release(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(attachment, "release", interrupt)
        with pytest.raises(KeyboardInterrupt):
            amp.close()
        amp.close()
    assert all(torch.equal(value, trained[key]) for key, value in model.state_dict().items())
    assert not any(isinstance(p, masters.Master) for group in optimizer.param_groups for p in group["params"])
    assert castwise.Amp.of(model) is None


@pytest.mark.parametrize("name", MASTERS)
def test_masters_belong_to_one_session(name: str) -> None:
    first, second, tied = Net(), Net(), Net()
    tied.last = first.last
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(first, optimizer)
        other = castwise.Amp(name, device=DEVICE)
        with pytest.raises(StateError, match=r"this SGD .*another Amp"):
            other.prepare(second, optimizer)
        with pytest.raises(StateError, match=r"last\.weight of this Net already has an fp32 master"):
            other.prepare(tied, torch.optim.SGD(tied.parameters(), 0.1))
        amp.prepare(second, optimizer)
        train(amp, first, optimizer)


# --- optimizers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_step_refuses_an_optimizer_that_prepare_never_saw(name: str) -> None:
    model = Net()
    optimizer, other = (OPTIMIZERS["sgd"](model.parameters()) for _ in range(2))
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        amp.backward(1e-3 * model(X).mean())
        with pytest.raises(StateError, match=r"step\(SGD\): this optimizer was not prepared by this Amp"):
            amp.step(other)
        amp.step(optimizer)


@pytest.mark.parametrize("name", MASTERS)
def test_training_low_weights_without_masters_is_noticed(name: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with castwise.Amp(name, device=DEVICE) as amp:
        amp.prepare(model)
        amp.backward(1e-3 * model(X).mean())
        with pytest.raises(
            StateError,
            match=r"SGD.step\(\): conv.weight of Net is stored in .*amp.prepare\(model, optimizer\)",
        ):
            optimizer.step()


# --- compiled, pickled, interrupted -------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize("how", ["compiled", "raw", "module.compile()"])
@pytest.mark.parametrize("kind", ["own class", "sequential"])
def test_what_has_run_compiled_is_refused(kind: str, how: str) -> None:
    torch._dynamo.reset()
    model: Any = Net() if kind == "own class" else nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = X if kind == "own class" else torch.rand(2, 4)
    if how == "module.compile()":
        model.compile(backend="aot_eager")
        compiled = model
    else:
        compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    amp = castwise.Amp("bf16-mixed+output=as_is", device=DEVICE)
    if (kind, how) == ("sequential", "module.compile()"):  # torch runs its __call__ and hooks uncompiled
        amp.prepare(model)
        assert model(x).dtype is torch.bfloat16
        amp.close()
        return
    with pytest.raises(StateError, match="already run compiled"):
        amp.prepare(model if how == "raw" else compiled)
    other = Net() if kind == "own class" else nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    amp.prepare(other)  # another module of the class has not run compiled
    amp.close()
    torch._dynamo.reset()


class Stops(nn.Module):
    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.inner, self.error = nn.Linear(4, 4), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x


import asyncio  # noqa: E402


class Streams(nn.Linear):
    def stream(self, x: Any) -> Any:
        yield self(x)

    async def later(self, x: Any) -> Any:
        return self(x)

    async def flow(self, x: Any) -> Any:
        yield self(x)


class Lazily(nn.Linear):
    def forward(self, x: Any) -> Any:
        yield super().forward(x)


@pytest.mark.parametrize(
    ("make", "method", "kind"),
    [
        (Streams, "stream", "generator"),
        (Streams, "later", "coroutine"),
        (Streams, "flow", "async generator"),
        (Lazily, "forward", "generator"),
    ],
)
def test_code_that_runs_after_its_call_has_returned_is_refused(
    make: type[nn.Linear], method: str, kind: str
) -> None:
    """It would run outside of the plan, in another precision than the plan says."""
    model = make(4, 4)
    methods = () if method == "forward" else (method,)
    with pytest.raises(
        StateError, match=rf"prepare: {make.__name__}\.{method} is a {kind}: its code runs after"
    ):
        castwise.Amp("bf16-mixed", device=DEVICE).prepare(model, methods=methods)
    assert castwise.Amp.of(model) is None
    with castwise.Amp("fp32", device=DEVICE) as amp:
        amp.prepare(model, methods=methods)


def collected(method: Any) -> Any:
    """Decorate a generator method so that a call runs it to its end."""
    return functools.wraps(method)(lambda self, x: [*method(self, x)])


def passed_on(method: Any) -> Any:
    return functools.wraps(method)(lambda self, x: method(self, x))


class Later(nn.Linear):
    @collected
    def forward(self, x: Any) -> Any:
        yield super().forward(x)

    @passed_on
    def stream(self, x: Any) -> Any:
        yield self(x)

    @contextlib.contextmanager
    def session(self, x: Any) -> Any:
        yield self(x)

    def mapped(self, x: Any) -> Any:
        return {"out": map(self, [x])}

    def ready(self, x: Any) -> Any:
        return self(x), list(x)


def test_a_generator_that_a_decorator_runs_to_its_end_is_a_plain_method() -> None:
    model, x = Later(4, 4).to(DEVICE), torch.rand(2, 4, device=DEVICE)
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(model, methods=("ready",))
        assert model(x)[0].dtype is model.ready(x)[0][0].dtype is torch.float32


@pytest.mark.parametrize(
    ("method", "kind"), [("stream", "generator"), ("session", "GeneratorContextManager"), ("mapped", "map")]
)
def test_what_may_run_code_later_is_told_once(method: str, kind: str) -> None:
    model, x = Later(4, 4).to(DEVICE), torch.rand(2, 4, device=DEVICE)
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(model, methods=(method,))
        with pytest.warns(
            UserWarning, match=rf"This Later, which is prepared, returns a {kind}: code of the model"
        ):
            getattr(model, method)(x)
        getattr(model, method)(x)  # warnings are errors here
    with castwise.Amp("fp32", device=DEVICE) as amp:
        amp.prepare(model, methods=(method,))
        getattr(model, method)(x)


@each_value(2)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit, ValueError]
)
@pytest.mark.parametrize(
    "plan", ["bf16-mixed", "O1", "bf16-true", "bf16-mixed+regions.0.inner=fp32+regions.0=fp16"]
)
@pytest.mark.parametrize("how", ["call", "method"])
def test_an_interrupted_forward_leaves_no_autocast_behind(
    how: str, plan: str, error: type[BaseException]
) -> None:
    class Model(nn.Sequential):
        def again(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = Model(Stops(error()), nn.Linear(4, 4))
    x = torch.rand(2, 4)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, methods=("again",))
        try:
            model(x) if how == "call" else model.again(x)
        except error:
            assert not torch.is_autocast_enabled(DEVICE)  # immediately, not only when the exception is freed
            assert frames.depth() == 0
        model[0].error = None
        out = model(x)
        model[0].error = error()
        with torch.autocast(DEVICE, dtype=torch.bfloat16), contextlib.suppress(error):
            model(x)
        assert not torch.is_autocast_enabled(DEVICE)
        model[0].error = None
        assert torch.equal(model(x), out)


@each_value(2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("call", range(1, 13, 2))
@pytest.mark.parametrize("name", ["bf16-true", "fp16-true"])
def test_a_prepare_that_fails_leaves_the_optimizers_state_to_the_last_bit(
    name: str, call: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cast to the low format and back would have rounded it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    fit, calls = state._fit_entry, itertools.count(1)

    def fails(*args: Any) -> Any:
        if next(calls) == call:
            raise error
        return fit(*args)

    monkeypatch.setattr(state, "_fit_entry", fails)
    with pytest.raises(error):
        castwise.Amp(name, device=DEVICE).prepare(model, optimizer)
    assert castwise.Amp.of(model) is None
    after = optimizer.state_dict()
    for index, entries in before["state"].items():
        for key, value in entries.items():
            assert after["state"][index][key].dtype is value.dtype
            assert torch.equal(after["state"][index][key], value)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()


# --- optimizers that are made later -------------------------------------------------------------------------


def trained(plan: str, late: bool) -> list[torch.Tensor]:
    model = Net()
    with castwise.Amp(plan, device=DEVICE) as amp:
        if late:
            amp.prepare(model)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        amp.prepare(model, optimizer)
        for _ in range(3):
            amp.backward(model(X).square().mean())
            amp.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
    assert not any(group["fused"] for group in optimizer.param_groups)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "plan", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-mixed+memory_format=channels_last+optimizer=fused"]
)
def test_an_optimizer_that_is_made_later_joins(plan: str) -> None:
    for late, early in zip(trained(plan, late=True), trained(plan, late=False), strict=True):
        assert torch.equal(late, early)


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed+memory_format=channels_last+optimizer=fused"])
def test_one_that_has_joined_is_guarded_and_let_go_with_the_session(plan: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    model(X)  # the running mean changes
    before = photograph(model, optimizer, values=False)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model)
        amp.prepare(model, optimizer)
        amp.backward(model(X * torch.inf).mean())
        assert amp.step(optimizer).skipped
        with pytest.raises(StateError, match="already prepared, by this Amp"):
            amp.prepare(model, optimizer)
    after = photograph(model, optimizer, values=False)
    del before["state"], after["state"]  # a fused kernel creates state before it learns that it skips
    assert same(after, before)


@pytest.mark.parametrize("plan", MASTERS)
def test_one_that_is_made_after_parameters_were_stored_low_is_refused(plan: str) -> None:
    model = Net()
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model)
        with pytest.raises(StateError, match="already prepared, by this Amp"):
            amp.prepare(model, OPTIMIZERS["adamw"](model.parameters()))


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-mixed+ops.tanh=fp32"])
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
def test_a_forward_that_somebody_puts_inside_autocast_is_refused(plan: str, after: bool) -> None:
    """Accelerate does this for its own mixed precision, through its own wrapper."""
    amp, model = castwise.Amp(plan, device=DEVICE), Net()
    if after:
        amp.prepare(model)
    inside = torch.autocast(DEVICE, dtype=torch.float16)(type(model).forward)
    model.forward = functools.wraps(inside)(lambda *args: inside(model, *args))
    with pytest.raises(
        StateError, match=rf"forward of this Net was replaced by one inside torch\.autocast\('{DEVICE}'\)"
    ):
        model(X) if after else amp.prepare(model)
    for harmless in (type(model).forward, torch.autocast(DEVICE, enabled=False)(type(model).forward)):
        model.forward = harmless.__get__(model)
        castwise.Amp.of(model) or amp.prepare(model)
        assert model(X).dtype is torch.float32
    amp.close()
