"""``detach``, undoing ``fuse`` and a failed ``attach`` leave everything as it was."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from castwise import Amp
from castwise.core.masters import (
    attach,
    attachment_of,
    master_of,
    original_of,
    remember_original,
    restore,
    store,
)
from castwise.core.session.fused import fuse
from castwise.errors import StateError
from tests.core.masters.outside import SAM
from tests.core.masters.test_masters_gradients import backward, held
from tests.core.masters.test_masters_optimizers import Net, Weights, lower, train
from tests.here import DEVICE


def hooks(model: nn.Module) -> list[int]:
    return [
        len(table)
        for module in model.modules()
        for table in (
            module._forward_pre_hooks, module._forward_hooks, module._load_state_dict_pre_hooks,
            module._state_dict_pre_hooks,
        )
    ]  # fmt: skip


def picture(model: nn.Module, optimizer: Optimizer) -> Any:
    """Return everything that detaching or a failed attach must not change."""
    return (
        [(p.dtype, p.grad_dtype, None if p.grad is None else p.grad.dtype) for p in model.parameters()],
        hooks(model),
        [sorted(vars(module)) for module in model.modules()],
        [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        {id(p): {k: getattr(v, "dtype", None) for k, v in s.items()} for p, s in optimizer.state.items()},
        {id(p): type(p) for p in optimizer.state},
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
        len(optimizer._optimizer_load_state_dict_post_hooks),
        sorted(vars(optimizer)),
    )


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("wanted", ["default", "any", "fp32"])
def test_detach_restores_everything(wanted: str, count: int, grads: bool) -> None:
    """With one optimizer, and with two that share parameters and are detached one after the other."""
    torch.manual_seed(0)
    model = Net()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for _ in range(count)]
    for optimizer in optimizers:
        train(model, optimizer, 2)
    for parameter in model.parameters():
        if wanted != "default":
            parameter.grad_dtype = None if wanted == "any" else torch.float32
    if grads:
        backward(model)
    before = [picture(model, optimizer) for optimizer in optimizers]
    values = [p.detach().clone() for p in model.parameters()]
    moments = [[v.clone() for s in o.state.values() for v in s.values()] for o in optimizers]
    former = lower(model, torch.bfloat16, keep=nn.BatchNorm1d)
    for parameter in former:
        if parameter.grad is not None and wanted == "default":
            parameter.grad = parameter.grad.to(parameter.dtype)
    attachments = [attach(optimizer, model, originals=former) for optimizer in optimizers]
    for attachment in attachments:
        attachment.detach(write_back=True)
    assert [picture(model, optimizer) for optimizer in optimizers] == before
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(parameter.detach(), value)
        assert master_of(parameter) is None
    for optimizer, kept in zip(optimizers, moments, strict=True):
        now = [optimizer.state[p][k] for p in model.parameters() for k in optimizer.state[p]]
        assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))
    train(model, optimizers[0], 1)


def test_detach_after_ddp_gradients_restores_grad_dtype() -> None:
    """``accept_low_gradients`` lifts grad_dtype, and detach restores it."""
    model = Weights()
    former = lower(model, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach(optimizer, model, originals=former)
    attachment.accept_low_gradients()
    attachment.detach(write_back=True)
    assert {p.grad_dtype for p in model.parameters()} == {torch.float32}


class Skips(Optimizer):
    """A wrapper that derives from Optimizer without calling its ``__init__``."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_an_optimizer_that_skipped_its_init_is_refused_in_words() -> None:
    """Nothing is changed."""
    model = Weights()
    lower(model, torch.bfloat16)
    inner = torch.optim.AdamW(model.parameters())
    before = picture(model, inner)
    with pytest.raises(
        StateError, match=r"Skips is a torch.optim.Optimizer whose Optimizer.__init__ was never"
    ):
        attach(Skips(inner), model)
    assert picture(model, inner) == before


def test_an_attach_that_fails_half_way_leaves_all_as_it_was() -> None:
    """Memory for the second master runs out after the first was made."""
    model = Weights()
    former = lower(model, torch.bfloat16)
    full = former[model.a.weight].clone()
    model.b.weight = nn.Parameter(
        torch.zeros(1, dtype=torch.bfloat16).expand(10**14)
    )  # too large for a master
    optimizer = torch.optim.AdamW(model.parameters())
    before = picture(model, optimizer)
    with pytest.raises(RuntimeError, match=r"alloc|memory"):
        attach(optimizer, model, originals=former)
    assert picture(model, optimizer) == before
    assert attachment_of(optimizer) is None
    assert torch.equal(original_of(model.a.weight), full)  # type: ignore[arg-type]


def test_detach_restores_also_when_the_optimizer_is_gone() -> None:
    """The masters live as long as the attachment."""
    model = Weights()
    former = lower(model, torch.bfloat16)
    attachment = attach(torch.optim.SGD(model.parameters(), lr=0.1), model, originals=former)
    values = [m.detach().clone() for m in attachment.masters]
    attachment.detach(write_back=True)
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(parameter.detach(), value)


def test_sam_and_its_base_are_both_left() -> None:
    """Two optimizers share the same groups."""
    model = Weights()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    before = picture(model, optimizer)
    former = lower(model, torch.bfloat16)
    attach(optimizer, model, originals=former).detach(write_back=True)
    assert picture(model, optimizer) == before
    assert held(optimizer.base_optimizer)[0] is model.a.weight


def test_a_model_that_leaves_takes_its_masters_and_hooks_along() -> None:
    """The other model keeps its own."""
    models = [Weights(), Weights()]
    optimizer = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)
    hooks = [[len(m._forward_pre_hooks), len(m._state_dict_pre_hooks)] for m in models[0].modules()]
    former = lower(models[0], torch.bfloat16) | lower(models[1], torch.bfloat16)
    attachment = attach(optimizer, models[0], originals=former)
    attach(optimizer, models[1])
    attachment.leave(models[0])
    assert [[len(m._forward_pre_hooks), len(m._state_dict_pre_hooks)] for m in models[0].modules()] == hooks
    for parameter in models[0].parameters():
        assert torch.equal(parameter.detach(), former[parameter])
    assert held(optimizer)[:2] == list(models[0].parameters())
    assert attachment.stored == tuple(models[1].parameters())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Start a process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("write_back", [True, False])
def test_dtensors_are_stored_anew(write_back: bool) -> None:
    """The memory and metadata of DTensors change; forward, backward and step work."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    plain = Weights()
    model = parallelize_module(
        copy.deepcopy(plain), init_device_mesh("cpu", (1,)), {"a": ColwiseParallel(), "b": RowwiseParallel()}
    )
    former = {}
    for parameter in model.parameters():
        former[parameter] = parameter.detach()
        store(parameter, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attachment = attach(optimizer, model, originals=former)
    model(torch.ones(2, 8).bfloat16()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    full = [m.full_tensor().detach().clone() for m in held(optimizer)]  # type: ignore[attr-defined]
    attachment.detach(write_back=write_back)
    for parameter, want in zip(model.parameters(), full, strict=True):
        if not write_back:
            assert restore(parameter)
        assert parameter.dtype is torch.float32
        assert parameter.to_local().dtype is torch.float32  # type: ignore[attr-defined]
        assert torch.equal(parameter.full_tensor().detach(), want)  # type: ignore[attr-defined]
    if write_back:  # otherwise the optimizer's state is low-precision
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()


# --- fused kernels ------------------------------------------------------------------------------------------

FUSIBLE: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    **(
        {"adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05)} if DEVICE != "cuda" else {}
    ),  # there is no such kernel
}


def flags(optimizer: Optimizer) -> Any:
    return (
        [
            {k: v for k, v in g.items() if k != "params"}
            for g in (optimizer.defaults, *optimizer.param_groups)
        ],
        {
            id(p): (type(s.get("step")), getattr(s.get("step"), "dtype", None))
            for p, s in optimizer.state.items()
        },
        getattr(optimizer, "_step_supports_amp_scaling", "unset"),
        sorted(vars(optimizer)),
    )


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("make", FUSIBLE.values(), ids=FUSIBLE.keys())
def test_unfusing_leaves_the_optimizer_as_it_was(make: Any, trained: bool) -> None:
    """Restores flags, defaults, counters and what a GradScaler checks; training continues as without fusing."""
    results, undo = [], list[Callable[[], None]]()
    for fused in (False, True):
        torch.manual_seed(0)
        model = Weights()
        optimizer = make(list(model.parameters()))
        if trained:
            train(model, optimizer, 2)
        before = flags(optimizer)
        if fused:
            fuse(optimizer, undo.append)
            assert optimizer.defaults["fused"] is True
            train(model, optimizer, 2)
            undo[0]()
            if trained:
                assert flags(optimizer) == before
            else:
                train(model, fresh := make(list(Weights().parameters())), 0)
                assert flags(optimizer)[0] == flags(fresh)[0]
                assert flags(optimizer)[2:] == flags(fresh)[2:]
        else:
            train(model, optimizer, 2)
        train(model, optimizer, 2)
        results.append([p.detach().clone() for p in model.parameters()])
    for plain, other in zip(*results, strict=True):
        # The fused kernels round in a different order.
        torch.testing.assert_close(plain, other, rtol=1e-5, atol=1e-6)


def test_groups_added_to_a_fused_optimizer_are_unfused_too() -> None:
    """They were added with the fused defaults."""
    model = Weights()
    optimizer = torch.optim.AdamW([model.a.weight])
    undo: list[Callable[[], None]] = []
    fuse(optimizer, undo.append)
    optimizer.add_param_group({"params": [model.b.weight]})
    assert optimizer.param_groups[1]["fused"] is True
    undo[0]()
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]
    assert [group["foreach"] for group in optimizer.param_groups] == [None, None]
    undo[0]()
    train(model, optimizer, 1)


# --- interrupted, and still undone ---------------------------------------------------------------------------


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line executed in the given castwise packages."""

    def __init__(self, line: int, rooms: Sequence[str] = ("masters", "session")) -> None:
        self.left = line
        self.rooms = [f"castwise/core/{room}" for room in rooms]

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if not any(room in frame.f_code.co_filename for room in self.rooms):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@contextlib.contextmanager
def interrupted(line: int, *rooms: str) -> Iterator[Interrupts]:
    former, tracer = sys.gettrace(), Interrupts(line, rooms or ("masters", "session"))
    sys.settrace(tracer)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield tracer
    finally:
        sys.settrace(former)


def trained_net() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def numbers(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    moments = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [value.detach().clone() for value in (*model.parameters(), *moments)]


def test_an_interrupted_attach_leaves_all_as_it_was() -> None:
    """An interrupt at any line leaves attributes, weights and moments as they were, bit for bit."""
    line = 1
    while True:
        model, optimizer = trained_net()
        values = numbers(model, optimizer)
        former = lower(model, torch.bfloat16)
        for parameter, value in former.items():
            remember_original(parameter, value)
        before = picture(model, optimizer)
        with interrupted(line) as tracer:
            attach(optimizer, model)
        if tracer.left > 0:
            break
        done = attachment_of(optimizer)
        if done is not None:  # the interrupt came while it returned
            assert len(done.masters) == len(values) // 4, line
            line += 7
            continue
        assert picture(model, optimizer) == before, line
        for parameter in model.parameters():
            assert master_of(parameter) is None
            assert restore(parameter)
        assert all(map(torch.equal, values, numbers(model, optimizer))), line
        line += 7
    assert line > 100


def test_an_interrupted_prepare_is_whole_or_not_at_all() -> None:
    """Weights and moments are unchanged bit for bit, and the model can be prepared afterwards."""
    line = 1
    while True:
        model, optimizer = trained_net()
        values, before = numbers(model, optimizer), picture(model, optimizer)
        amp = Amp("bf16-master")
        with interrupted(line) as tracer:
            amp.prepare(model, optimizer)
        if tracer.left > 0:
            break
        if model[0].weight.dtype is torch.bfloat16:  # prepare was complete when it was interrupted
            amp.close()
        assert all(map(torch.equal, values, numbers(model, optimizer))), line
        assert picture(model, optimizer)[3:6] == before[3:6], line
        amp.prepare(model, optimizer)
        amp.close()
        line += 23


def refuses_setting(optimizer: Optimizer) -> None:
    class Sealed(type(optimizer)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "__reduce_ex__":
                raise RuntimeError("sealed")
            super().__setattr__(name, value)

    optimizer.__class__ = Sealed


def refuses_hooks(optimizer: Optimizer) -> None:
    class Deaf(type(optimizer)):  # type: ignore[misc]
        def register_step_post_hook(self, hook: Any) -> Any:
            raise RuntimeError("deaf")

    optimizer.__class__ = Deaf


@pytest.mark.parametrize("spoil", [refuses_setting, refuses_hooks])
def test_an_optimizer_that_takes_no_masters_is_left_alone(spoil: Any) -> None:
    """``prepare`` raises the optimizer's error and changes nothing."""
    with Amp("bf16-master") as amp:  # makes the changes that castwise makes once per process
        first = trained_net()
        amp.prepare(*first)
    model, optimizer = trained_net()
    spoil(optimizer)
    values, before = numbers(model, optimizer), picture(model, optimizer)
    with pytest.raises(RuntimeError):
        Amp("bf16-master").prepare(model, optimizer)
    assert picture(model, optimizer) == before
    assert all(map(torch.equal, values, numbers(model, optimizer)))


@pytest.mark.parametrize("method", ["float", "double"])
def test_a_model_typed_anew_gets_its_masters_values_at_close(method: str) -> None:
    """It has torch's own ``grad_dtype``, and can be trained."""
    model, optimizer = trained_net()
    amp = Amp("bf16-master")
    amp.prepare(model, optimizer)
    amp.backward(model(torch.ones(2, 8)).square().mean())
    amp.step(optimizer)
    optimizer.zero_grad()
    want = {name: value.clone() for name, value in amp.model_state_dict(model).items()}
    getattr(model, method)()
    amp.close()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), want[name])
        assert parameter.grad_dtype is torch.float32
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
