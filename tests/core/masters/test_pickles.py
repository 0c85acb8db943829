"""Pickles of prepared models, optimizers and schedulers contain what ``close`` would leave, and load without castwise."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import io
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import castwise
from castwise import Amp, Plan, Recorder
from castwise.core.plans.plan import PRESETS
from tests.here import DEVICE

PLANS: dict[str, Any] = {
    **{name: name for name in PRESETS if name != "tf32"},
    "regions": Plan(compute="bf16", params="compute", regions={"0": "fp32"}, ops={"tanh": "fp32"}),
    "channels_last": "bf16-master+memory_format=channels_last",
}


class Tied(nn.Module):
    """Weights shared by two modules, a norm, a buffer, and a method that is called directly."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8)
        self.out.weight = self.words.weight
        self.register_buffer("shift", torch.full((4,), 0.1))

    def encode(self, x: Tensor) -> Tensor:
        words = torch.tanh(self.words(x))
        encoded: Tensor = self.norm(words + self.shift.to(words.dtype))
        return encoded

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.encode(x))
        return out


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))


MODELS: dict[str, tuple[Any, Tensor]] = {
    "dense": (dense, torch.linspace(-1, 1, 32).reshape(8, 4)),
    "conv": (conv, torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)),
    "tied": (Tied, torch.arange(8).reshape(2, 4)),
}


def made(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, x = MODELS[kind]
    model = make()
    model(x)
    return model, x


@pytest.fixture
def trained() -> Iterator[Any]:
    """Return a function that trains a few steps under a plan; close the sessions at the end."""
    with_sessions: list[Amp] = []

    def train(plan: Any, kind: str = "dense", **how: Any) -> tuple[Amp, nn.Module, Any, StepLR, Tensor]:
        model, x = made(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
        amp = Amp(plan, device=DEVICE)
        with_sessions.append(amp)
        amp.prepare(model, optimizer, **how)
        scheduler = StepLR(optimizer, 1)
        for _ in range(3):
            # Small enough not to overflow at any loss scale.
            amp.backward(model(x).float().square().mean() * 0.01)
            amp.step(optimizer)
            optimizer.zero_grad()
            scheduler.step()
        return amp, model, optimizer, scheduler, x

    yield train
    for amp in with_sessions:
        amp.close()


def plainly(data: bytes) -> Any:
    assert b"castwise" not in data
    return pickle.loads(data)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_pickle_is_what_close_would_leave(plan: str, kind: str, trained: Any) -> None:
    if plan == "regions" and kind == "tied":
        pytest.skip("the model has no module of that name")
    amp, model, optimizer, scheduler, x = trained(PLANS[plan], kind)
    twin, other, schedule = plainly(pickle.dumps((model, optimizer, scheduler)))
    amp.close()
    assert {**vars(twin), "training": 0}.keys() == vars(model).keys()
    for table in (name for name in vars(model) if "hooks" in name):
        for ours, theirs in zip(twin.modules(), model.modules(), strict=True):
            assert vars(ours)[table] == vars(theirs)[table], table
    for (name, ours), (_, theirs) in zip(twin.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert ours.dtype is theirs.dtype
        assert type(ours) is nn.Parameter
    for (name, ours), (_, theirs) in zip(twin.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert schedule.optimizer is other
    held = other.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, twin.parameters(), strict=True))
    for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True):
        for key, value in optimizer.state[b].items():
            assert torch.equal(other.state[a][key], value), key
    for m, o in ((twin, other), (model, optimizer)):  # both continue in plain torch
        m(x).square().mean().backward()
        o.step()
    torch.testing.assert_close(twin.state_dict(), model.state_dict(), equal_nan=True)


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-master", "fp16-mixed", "bf16-true"])
def test_weights_only_takes_the_models_own_classes_alone(plan: str, trained: Any) -> None:
    _, model, _, _, x = trained(plan, "tied")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([Tied, nn.Embedding, nn.LayerNorm, nn.Linear]):
        again = torch.load(file, weights_only=True)
    assert again.out.weight is again.words.weight
    assert again(x).dtype is torch.float32


def test_it_loads_where_castwise_is_not(trained: Any, tmp_path: Path) -> None:
    _, model, optimizer, _, _ = trained("fp16-master")

    class Holder(dict[str, Any]):
        pass

    file = tmp_path / "all.pt"
    torch.save({"model": model, "optimizer": optimizer, "copy": copy.deepcopy(model)}, file)
    code = f"""import sys
sys.modules["castwise"] = None
import torch
found = torch.load({str(file)!r}, weights_only=False)
x = torch.ones(3, 4, device={DEVICE!r})
found["model"](x).sum().backward()
found["optimizer"].step()
found["copy"].eval()(x)
print({{p.dtype for p in found["model"].parameters()}}, {{p.dtype for p in found["copy"].parameters()}})
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.stdout.strip() == "{torch.float32} {torch.float32}", said.stderr


def test_what_arrived_low_is_low_again(trained: Any) -> None:
    model = dense().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(model, optimizer, widen=True)
        amp.backward(model(torch.ones(4, 4)).square().mean())
        amp.step(optimizer)
        twin, other = plainly(pickle.dumps((model, optimizer)))
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}
    assert {s["momentum_buffer"].dtype for s in other.state.values()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))


def test_weights_are_those_of_now_at_each_pickle(trained: Any) -> None:
    """Includes values written by hand. A pickler that is kept alive does not keep old values alive."""
    _, model, _, _, _ = trained("bf16-master")
    kept = pickle.Pickler(io.BytesIO())
    kept.dump(model)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    assert (plainly(pickle.dumps(model))[0].weight == 3).all()
    model[0].bias.data.fill_(2.0)  # does not change the version counter
    assert (plainly(pickle.dumps(model))[0].bias == 2).all()


def test_attributes_of_parameters_stay(trained: Any) -> None:
    amp, model, optimizer, _, _ = trained("bf16-master")
    model[0].weight.use_muon = True
    twin, other = plainly(pickle.dumps((model, optimizer)))
    assert twin[0].weight.use_muon
    assert other.param_groups[0]["params"][0].use_muon
    assert twin[0].weight.requires_grad
    model[0].weight.requires_grad_(False)
    assert not plainly(pickle.dumps(model))[0].weight.requires_grad
    assert amp.holds(optimizer)


def hook(*_: Any) -> None: ...


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "bf16-master"])
def test_the_users_own_hooks_stay(plan: str, trained: Any) -> None:
    _, model, _, _, x = trained(plan)
    model.register_forward_hook(hook)
    model.register_forward_pre_hook(hook, with_kwargs=True)
    model.register_full_backward_hook(hook)
    model[0].register_state_dict_pre_hook(hook)
    model[0].register_load_state_dict_post_hook(hook)
    twin = plainly(pickle.dumps(model))
    assert [*twin._forward_hooks.values()] == [*twin._forward_pre_hooks.values()] == [hook]
    assert [*twin._forward_pre_hooks_with_kwargs] == [*twin._forward_pre_hooks]
    assert not twin._forward_hooks_always_called
    assert [*twin._backward_hooks.values()] == [hook]
    assert len(twin[0]._state_dict_pre_hooks) == 1
    twin(x.requires_grad_()).sum().backward()


class OwnState(nn.Linear):
    """Defines ``__getstate__`` as Lightning's modules do."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


class OwnReduce(nn.Linear):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol)


class WithSlots(nn.Linear):
    """Has a state of two dictionaries because of its slots."""

    __slots__ = ("more",)


class AsArguments(nn.Linear):
    """Pickles its attributes as arguments of its constructor, like a module traced by torch.fx."""

    def __reduce__(self) -> Any:
        return made_of, (type(self), dict(vars(self)))


def made_of(kind: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    module = kind.__new__(kind)
    vars(module).update(attributes)
    return module


def traced(*size: int) -> Any:
    module: Any = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(*size)))
    module.weight = getattr(module, "0").weight
    return module


@pytest.mark.parametrize("kind", [OwnState, OwnReduce, WithSlots, AsArguments, traced])
@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master"])
def test_classes_that_pickle_in_their_own_way(kind: Any, plan: str) -> None:
    model = kind(4, 2)
    with Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        twin = plainly(pickle.dumps(model))
        assert twin.weight.dtype is torch.float32
        assert not twin._forward_hooks
        copied = copy.deepcopy(model)
        if kind is not traced:  # copies of a traced module lose all forward hooks, in torch itself
            assert torch.equal(copied(torch.ones(1, 4)), model(torch.ones(1, 4)))
        assert plainly(pickle.dumps(copied)).weight.dtype is torch.float32


class OwnOptimizer(torch.optim.SGD):
    """Uses its own names in the pickled state."""

    def __getstate__(self) -> Any:
        return {"groups": self.param_groups, "of": self.state, "defaults": self.defaults}

    def __setstate__(self, state: Any) -> None:
        super().__setstate__({
            "param_groups": state["groups"],
            "state": state["of"],
            "defaults": state["defaults"],
        })


def test_optimizers_that_pickle_in_their_own_way() -> None:
    model = dense()
    optimizer = OwnOptimizer(model.parameters(), 0.1, momentum=0.9)
    with Amp("bf16-master", device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        amp.backward(model(torch.ones(2, 4)).sum())
        amp.step(optimizer)
        twin, other = plainly(pickle.dumps((model, optimizer)))
    held = other.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, twin.parameters(), strict=True))
    assert all(other.state[p]["momentum_buffer"].dtype is torch.float32 for p in held)


class Last:
    """A mixin after torch's class with its own ``__reduce_ex__``."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, ("in its own way",)


class Mixed(nn.Module, Last): ...


class Table(dict[str, Any]):
    """Holds its module, as tables in a library for sharded embeddings do."""

    def __init__(self, module: Any, entries: Any = ()) -> None:
        super().__init__(entries)
        self.module = module

    def __reduce__(self) -> Any:
        return Table, (None, dict(self))


class Strange(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        vars(self)["_parameters"] = Table(self, self._parameters)
        self.layer_hooks: dict[str, Any] = collections.defaultdict(list, {"none": None, "one": [1]})


@pytest.mark.parametrize("plan", [None, "bf16-mixed", "bf16-master"])
def test_what_is_not_castwises_pickles_as_ever(plan: str | None) -> None:
    with Amp("bf16-master", device=DEVICE) as amp:
        amp.prepare(dense())
    assert pickle.loads(pickle.dumps(Mixed())) == "in its own way"
    model = Strange()
    with Amp(plan or "fp32", device=DEVICE) as amp:
        if plan is not None:
            amp.prepare(model)
        twin = plainly(pickle.dumps(model))
    assert twin.layer_hooks == model.layer_hooks
    assert type(twin.layer_hooks) is collections.defaultdict
    assert type(twin._parameters) is Table
    assert [*dict(twin.named_parameters())] == ["weight", "bias"]
    assert twin.weight.dtype is torch.float32


def test_methods_are_left_out() -> None:
    model = Tied()
    with Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(model, methods=("encode",))
        assert "encode" in vars(model)
        twin = plainly(pickle.dumps(model))
    assert "encode" not in vars(twin)
    assert twin.encode(torch.arange(4)).dtype is torch.float32


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master"])
def test_copies_of_copies_pickle_so_too_and_after_close(plan: str, trained: Any) -> None:
    amp, model, _, _, x = trained(plan)
    copies = [copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model)), castwise.AveragedModel(model)]
    amp.close()
    for each in copies:
        twin = pickle.loads(pickle.dumps(each))
        inner = getattr(twin, "module", twin)
        assert {p.dtype for p in inner.parameters()} == {torch.float32}
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in inner.modules())
        inner(x)
    plainly(pickle.dumps(copies[0]))


def test_every_pickler() -> None:
    import cloudpickle

    model = dense()
    with Amp("bf16-master", device=DEVICE) as amp:
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        assert b"castwise" not in cloudpickle.dumps(model)
        file = io.BytesIO()
        pickle._Pickler(file).dump(model)  # type: ignore[attr-defined]
        plainly(file.getvalue())
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            plainly(pickle.dumps(model, protocol))


# --- objects that hold a session -------------------------------------------------------------------------------


@dataclasses.dataclass
class Holder:
    amp: Any
    model: nn.Module
    more: Any = None


class Owner(nn.Module):
    """A model that keeps its session as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.amp = Amp("bf16-mixed", device=DEVICE)
        self.amp.prepare(self.net)


def test_a_session_is_none_in_pickles_and_prepares_nothing_in_copies(trained: Any) -> None:
    amp, model, optimizer, scheduler, x = trained("fp16-mixed")
    amp.backward(model(x).sum() * float("inf"))
    amp.step(optimizer)
    optimizer.zero_grad()
    monitor, recorder = castwise.Monitor(amp), Recorder(amp, model, tempfile.mkdtemp())
    holder = Holder(amp, model, [scheduler, monitor, recorder, functools.partial(print, amp)])
    calls = [
        amp.step,
        functools.partial(amp.backward, name="it"),
        monitor.close,
        model.eval,
        functools.partial(print, 1),
    ]
    found = plainly(pickle.dumps(calls))
    assert found[:3] == [None] * 3
    assert isinstance(found[3].__self__, type(model))
    assert (found[4].func, found[4].args) == (print, (1,))
    found = plainly(pickle.dumps(holder))
    assert found.amp is found.more[1] is found.more[2] is found.more[3].args[0] is None
    copied = copy.deepcopy(holder)
    assert copied.amp is not amp
    assert copied.amp.plan == amp.plan
    assert copied.amp.get_scale() == amp.get_scale() < 65536.0
    assert copied.more[1] is copied.more[2] is None
    assert not copied.amp.holds(optimizer)
    assert Amp.of(copied.model) is None
    assert torch.equal(copied.model(x), model(x))
    assert copy.copy(holder).amp is amp
    assert copy.deepcopy(functools.partial(amp.step, 1)).func.__self__ is not amp
    owner = plainly(pickle.dumps(Owner()).replace(__name__.encode(), __name__.encode()))
    assert owner.amp is None
    monitor.close()
    recorder.close()


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "bf16-master"])
def test_a_sessions_scaler_goes_without_its_ranks(plan: str, trained: Any) -> None:
    amp, *_ = trained(plan)
    amp.get_scale()
    amp.scaler.update()
    for again in (pickle.loads(pickle.dumps(amp.scaler)), copy.deepcopy(amp.scaler)):
        assert again.get_scale() == amp.scaler.get_scale()


def test_schedulers_with_masters_go_on_alike(trained: Any) -> None:
    """Includes LambdaLR with functions that can be pickled."""
    _, model, optimizer, _, _ = trained("bf16-master")
    scheduler = LambdaLR(optimizer, Halves())
    twin = plainly(pickle.dumps(scheduler))
    copied = copy.deepcopy(scheduler)
    assert twin.lr_lambdas[0](2) == copied.lr_lambdas[0](2) == 0.25
    twin.optimizer.step()
    assert twin.last_epoch == scheduler.last_epoch
    assert {p.dtype for p in twin.optimizer.param_groups[0]["params"]} == {torch.float32}
    assert model[0].weight.dtype is torch.bfloat16


class Halves:
    def __call__(self, step: int) -> float:
        return 0.5**step
