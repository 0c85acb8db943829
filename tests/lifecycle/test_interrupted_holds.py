"""Process-wide settings and kernels are released even if taking or releasing them is interrupted."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from castwise import Amp, Plan
from castwise.core import _torch
from castwise.core.casting import kernels
from castwise.core.casting.context import override_rows
from castwise.core.session.process import Claim, _claimed
from tests.core.masters.test_undo import Interrupts, interrupted
from tests.here import DEVICE, FP32_MATMUL, init_process_group
from tests.soak import each_value

PLAN = Plan.parse("bf16-mixed+fp32_matmul=ieee+fp32_conv=ieee+ops.exp=fp32")


def settings() -> list[str]:
    backends = torch.backends.mkldnn
    return [backends.matmul.fp32_precision, backends.conv.fp32_precision]  # type: ignore[attr-defined]


def held() -> tuple[Any, ...]:
    gc.collect()
    return (
        settings(),
        dict(_claimed),
        {key: len(holders) for key, (_, holders) in kernels._registered.items()},
    )


class Settings:
    def __init__(self) -> None:
        self._claim = Claim(PLAN, DEVICE)

    def take(self) -> None:
        self._claim.take()

    def close(self) -> None:
        self._claim.close()


class Kernels:
    def __init__(self) -> None:
        self._lease: kernels.Lease | None = None

    def take(self) -> None:
        self._lease = kernels.Lease(override_rows(PLAN, DEVICE), DEVICE)

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()


ROOMS = "session/process", "casting/kernels"


@each_value()
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside another"])
@pytest.mark.parametrize("what", [Settings, Kernels])
def test_an_interrupt_while_it_is_taken_or_given_up(what: Callable[[], Any], alone: bool) -> None:
    """Interrupts come at each line; what another holder has is not affected."""
    other = what()
    if not alone:
        other.take()
    before = held()
    for act in ("take", "close"):
        line = 0
        while True:
            line += 5 if what is Settings else 23
            one = what()
            if act == "close":
                one.take()
            with interrupted(line, *ROOMS) as tracer:
                getattr(one, act)()
            if tracer.left > 0:
                one.close()
                break
            one.close()
            del one
            assert held() == before, (act, line)
        assert line > 8
    other.close()


def test_an_interrupted_ddp_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook that DistributedDataParallel adds to a prepared model is recorded before it is registered."""
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = Amp("bf16-master", device=DEVICE)
    register = nn.Module.register_forward_pre_hook

    def and_then_interrupt(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        register(module, *args, **kwargs)
        raise KeyboardInterrupt

    init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        amp.prepare(model, optimizer)
        before = dict(model._forward_pre_hooks)
        with monkeypatch.context() as patched:
            patched.setattr(nn.Module, "register_forward_pre_hook", and_then_interrupt)
            with pytest.raises(KeyboardInterrupt):
                DistributedDataParallel(model)
        assert dict(model._forward_pre_hooks) != before
        amp.close()
        assert not model._forward_pre_hooks
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(
    not _torch.cpu.cpu_has_bf16(), reason="this CPU has no second precision for fp32 products"
)
def test_a_session_whose_collection_is_interrupted_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores an error in a finalizer and never calls it again."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's hook keeps the frames alive
    before, line = held(), 0
    while True:
        line += 11
        amp = Amp(PLAN, device=DEVICE)
        layer = nn.Linear(4, 4)
        amp.prepare(layer)
        with interrupted(line, *ROOMS) as tracer:
            del layer, amp
            gc.collect()
        reached = tracer.left <= 0
        after = Amp(f"bf16-mixed+fp32_matmul={FP32_MATMUL}+ops.exp=fp32", device=DEVICE)
        layer = nn.Linear(4, 4)
        after.prepare(layer)
        with after.autocast():
            assert torch.ones(1, dtype=torch.bfloat16).exp().dtype is torch.float32, line
        after.close()
        if not reached:
            break
    assert line > 8
    with Amp(PLAN, device=DEVICE) as last:
        last.prepare(layer)
    assert held() == before


@pytest.mark.parametrize("what", [Settings, Kernels])
def test_what_a_signal_handler_gives_up_meanwhile_is_taken_anew(what: Callable[[], Any]) -> None:
    """At each line of ``take``, a signal handler makes the other holder give up its claim."""
    before, line = held(), 0
    while True:
        line += 5 if what is Settings else 23
        one, other = what(), what()
        other.take()
        tracer = Handler(line, other.close)
        sys.settrace(tracer)
        try:
            one.take()
        finally:
            sys.settrace(None)
        other.close()
        assert held() != before, line
        one.close()
        assert held() == before, line
        if tracer.left > 0:
            break
    assert line > 8


class Handler(Interrupts):
    """Acts at the n-th line, and continues."""

    def __init__(self, line: int, act: Callable[[], None]) -> None:
        super().__init__(line, ROOMS)
        self.act = act

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        try:
            return super().__call__(frame, event, arg)
        except KeyboardInterrupt:
            self.act()
            return None


def test_a_claim_goes_with_its_session() -> None:
    """The session is freed without close."""
    before = held()
    amp = Amp(PLAN, device=DEVICE)
    amp.prepare(nn.Linear(4, 4))
    alive = weakref.ref(amp)
    assert held() != before
    del amp
    gc.collect()
    assert alive() is None
    assert held() == before
