"""An interrupt right after something was put on a model or an optimizer, before it has been recorded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from castwise import Amp
from castwise.core import _torch
from castwise.core.masters import attachment
from castwise.core.session.undo import UndoLog
from tests.here import DEVICE

PLANS = (
    "bf16-mixed",
    "bf16-mixed+optimizer=fused",
    "bf16-master",
    "bf16-true",
    "O1",
    "fp16-master+regions.1=fp32",
    # Torch.compile does not support the simulated device.
    *(["bf16-mixed+compile=default"] if DEVICE != "sim" else []),
)
REGISTRATIONS = [
    *((nn.Module, f"register_{name}_hook") for name in ("forward_pre", "forward")),
    *((nn.Module, f"register_{name}_pre_hook") for name in ("load_state_dict", "state_dict")),
    *(
        (Optimizer, f"register_{name}_hook")
        for name in ("step_pre", "step_post", "load_state_dict_post", "state_dict_post")
    ),
    (_torch.steps, "subscribe"),
    (_torch.calls, "guard_calls"),
]


def pair() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, torch.optim.AdamW(model.parameters())


def hooks_of(*owners: Any) -> dict[str, list[Any]]:
    """Return all hooks on the owners and on all optimizers, and each compiled call of a module."""
    found: dict[str, list[Any]] = {"watchers": list(_torch.steps._subscribers)}
    for index, owner in enumerate((*owners, sys.modules["torch.optim.optimizer"])):
        for name, table in vars(owner).items():
            if "_hooks" in name and isinstance(table, dict):
                found[f"{index} {name}"] = list(table.items())
        found[f"{index} call"] = [getattr(owner, "_compiled_call_impl", None)]
    return found


class After:
    """Wraps functions; after the n-th call it raises KeyboardInterrupt."""

    def __init__(self, number: int) -> None:
        self.left = number

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return result

        return call


@pytest.mark.parametrize("line", PLANS)
def test_no_hook_outlives_an_interrupt_right_after_it_was_put_on(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers each function that registers hooks."""
    with Amp(line, device=DEVICE) as once:  # makes the changes that castwise makes once per process
        once.prepare(*(kept := pair()))
    del kept
    number = 0
    while True:
        number += 1
        model, optimizer = pair()
        before = hooks_of(*model.modules(), optimizer)
        after, amp = After(number), Amp(line, device=DEVICE)
        with monkeypatch.context() as patched:
            for owner, name in REGISTRATIONS:
                patched.setattr(owner, name, after.wrap(getattr(owner, name)))
            try:
                amp.prepare(model, optimizer)
            except KeyboardInterrupt:
                assert hooks_of(*model.modules(), optimizer) == before, number
        amp.close()
        assert hooks_of(*model.modules(), optimizer) == before, number
        amp.prepare(model, optimizer)
        amp.close()
        assert hooks_of(*model.modules(), optimizer) == before, number
        if after.left > 0:
            break
    assert number > 3


def test_hooks_go_from_the_layers_that_had_them() -> None:
    """Includes layers that are no longer in the model."""
    model, optimizer = pair()
    first = model[0]
    before = hooks_of(first)
    amp = Amp("bf16-master+regions.0=fp32", device=DEVICE)
    amp.prepare(model, optimizer)
    assert hooks_of(first) != before
    model[0] = nn.Linear(4, 4)
    amp.close()
    assert hooks_of(first) == before


def test_one_of_two_optimizers_of_a_model_leaves_the_other_its_hooks() -> None:
    """The hooks of the two look alike."""
    model = pair()[0]
    mine, others = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    first = attachment.attach(mine, model)
    alone = hooks_of(*model.modules())
    second = attachment.attach(others, model)
    second.detach()
    assert hooks_of(*model.modules()) == alone
    first.detach()


def test_an_interrupted_undo_leaves_gradients_recorded() -> None:
    """An interrupt inside torch's ``no_grad`` leaves gradients off; the rest of the undo log runs with them on."""
    seen = []
    left = [2]

    def interrupted() -> None:
        seen.append(torch.is_grad_enabled())
        if left[0]:
            left[0] -= 1
            torch.set_grad_enabled(False)  # left off, as by an interrupted no_grad
            raise KeyboardInterrupt if left[0] else RuntimeError

    log = UndoLog()
    log.callback(lambda: seen.append(torch.is_grad_enabled()))
    log.callback(interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.close()
    assert seen == [True, True, True]
    assert torch.is_grad_enabled()
    with contextlib.suppress(KeyboardInterrupt), UndoLog().transaction():
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt
    assert torch.is_grad_enabled()


def test_an_undo_is_not_cut_short_between_two_entries() -> None:
    """The interrupt comes when an entry has run but is still in the log."""
    done = []

    class Entries(list[Any]):
        left = 1

        def pop(self, *args: Any) -> Any:
            if self.left:
                self.left -= 1
                raise KeyboardInterrupt
            return super().pop(*args)

    log = UndoLog()
    log._entries = Entries()
    for number in range(3):
        log.callback(done.append, number)
    with pytest.raises(KeyboardInterrupt):
        log.close()
    assert set(done) == {0, 1, 2}
    assert not log._entries
