"""Check castwise once in a process if the installed release of torch is one on which the test suite has not passed.

castwise uses private parts of torch (``core/_torch``), and some of them could break without an error. Each check uses
some of them on a few numbers, in the way in which :class:`~castwise.Amp` does.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from castwise.core import _torch, devices, masters
from castwise.core.casting import autocast
from castwise.core.plans import rules
from castwise.core.plans.plan import Plan
from castwise.core.scaler import GradScaler

TESTED = ("2.11", "2.13", "2.14")
"""The releases of torch with which castwise was tested; docs/install.md has a table of what ran.

The whole test suite passes on 2.13 and 2.14, and most of it on 2.11.
"""


@functools.cache
def check_torch() -> None:
    """Warn if the installed release of torch is not one of :data:`TESTED`, and name the checks that fail on it.

    Warns:
        UserWarning: The release has not been tested. Issued once in a process.
    """
    release = ".".join(torch.__version__.split(".")[:2])
    if release in TESTED:
        return
    failed = [name for name, check in _CHECKS.items() if not _passes(check)]
    outcome = (
        f"These self-checks failed: {', '.join(failed)}. The features that they check may fail without an error"
        if failed
        else "The self-checks passed"
    )
    rows = (row for device in devices.autocast_types() for row in rules.describe("native", device))
    if newer := sorted({row.op for row in rows if row.rule == "native"}):
        outcome += f". Operators that castwise's tables do not list are cast as torch.autocast casts them: {', '.join(newer)}"
    warnings.warn(
        f"castwise has been tested with torch {', '.join(TESTED)}, and this is {torch.__version__}. {outcome}. Use a torch "
        f"release that was tested, or a castwise release that was tested with this torch.",
        stacklevel=3,
    )


def _passes(check: Callable[[], bool]) -> bool:
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            warnings.simplefilter("ignore")
            return check()
    except Exception:  # any exception means that the checked feature does not work
        return False


def _layer() -> nn.Linear:
    layer = nn.Linear(2, 1, bias=False, device="cpu", dtype=torch.float32)
    nn.init.ones_(layer.weight)
    return layer


def _overrides() -> bool:
    numbers = torch.ones(2, 2, dtype=torch.bfloat16, device="cpu")
    block = autocast(Plan(compute="bf16", ops=(("exp", "fp32"), ("mm", "fp32"))), device_type="cpu")
    with block:
        wide = numbers.exp().dtype is torch.mm(numbers, numbers).dtype is torch.float32
        mapped = torch.func.vmap(torch.exp)(numbers).dtype is torch.float32
    return wide and mapped and numbers.exp().dtype is torch.bfloat16


def _guards() -> bool:
    try:
        _torch.dynamo.set_guard_code(5)
        return _torch.dynamo.compiled_code_sees(lambda: _torch.dynamo.set_guard_code(6))
    finally:
        _torch.dynamo.set_guard_code(0)


def _backward() -> bool:
    seen: list[object] = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            seen.append((
                _torch.autograd.graph_task_id() != -1,
                _torch.autograd.running_node_number() is not None,
            ))
            _torch.autograd.on_graph_task_end(lambda: seen.append("end"))
            return grad

    Identity.__module__ = (
        __name__.partition(".")[0] + "_canary"
    )  # a format that neither torch nor castwise would choose

    def enter() -> Callable[[], None]:
        seen.append("enter")
        return lambda: seen.append("leave")

    def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seen.append("begin")
        found = call(*args, **kwargs)
        seen.append("done")
        return found

    x = torch.ones(2, requires_grad=True, device="cpu")
    with contextlib.ExitStack() as undo:
        undo.callback(_torch.autograd.around_python_backward(enter))
        undo.callback(_torch.autograd.around_backward(around))
        _torch.autograd.backward_of_scalar((Identity.apply(x) * 3).sum())  # type: ignore[no-untyped-call]
    noted = ["begin", "enter", (True, True), "leave", "end", "done"]
    return seen == noted and x.grad is not None and x.grad.tolist() == [3, 3]


def _scales() -> bool:
    layer = _layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scales = []
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(layer(torch.ones(1, 2, device="cpu")).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales == [8.0, 4.0] and layer.weight.tolist() == [[0.5, 0.5]]


def _masters() -> bool:
    layer = _layer().to(torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=2.0**-12)
    attachment = masters.attach(optimizer, layer)
    try:
        for _ in range(2):
            layer(torch.ones(1, 2, dtype=torch.bfloat16, device="cpu")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        master = optimizer.param_groups[0]["params"][0]
        return (
            master.dtype is torch.float32
            and master.tolist() == [[1 - 2.0**-11, 1 - 2.0**-11]]
            and layer.weight.dtype is torch.bfloat16
        )
    finally:
        attachment.detach()


def _hooks() -> bool:
    layer, seen = _layer(), list[object]()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    end = _torch.steps.subscribe(lambda stepped, *_: seen.append(stepped))
    try:
        optimizer.step()
    finally:
        end()
    before = _torch.tensors.version(layer.weight)
    with torch.no_grad():
        layer.weight.add_(1)

    def hook(*_: object) -> None:
        seen.append("hook")

    layer.register_forward_hook(hook)
    _torch.hooks.remove_hooks(layer, hook)
    layer(torch.ones(1, 2, device="cpu"))
    return seen == [optimizer] and _torch.tensors.version(layer.weight) == before + 1


_CHECKS: dict[str, Callable[[], bool]] = {
    "operator overrides": _overrides,
    "recompiling when the plan changes": _guards,
    "following backward": _backward,
    "the loss scale": _scales,
    "masters": _masters,
    "hooks of modules and optimizers": _hooks,
}
