"""Observers of a pass see operators and module calls in a fixed order and leave nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from castwise.lab.passes.observers import Args, Call, Kwargs, Observer, Operators, Run, observed


class Calls(Observer):
    """An observer that records the calls of all modules and, with each, the calls in progress."""

    def __init__(self) -> None:
        self.entered: list[tuple[Call, tuple[Call, ...]]] = []
        self.left: list[tuple[Call, bool]] = []

    def modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield from model.named_modules()

    def enter(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        self.entered.append((call, tuple(self.running)))

    def leave(self, call: Call, output: Any) -> None:
        assert self.running[-1] == call
        self.left.append((call, output is not None))


class Scaled(Observer):
    """An observer that multiplies the result of exp and records the order of calls."""

    def __init__(self, factor: float, order: list[float]) -> None:
        self._factor, self._order = factor, order

    def operator(self, run: Run, op: Any, args: Args, kwargs: Kwargs) -> Any:
        if op is not torch.ops.aten.exp.default:
            return run(op, args, kwargs)
        self._order.append(self._factor)
        return run(op, args, kwargs).detach() * self._factor


def has_hooks(model: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_last_hears_first_and_what_observers_run_themselves_is_unheard() -> None:
    seen, order = Operators(), list[float]()
    x = torch.ones(2)
    with observed(nn.Module(), seen, Scaled(2.0, order), Scaled(3.0, order)):
        out = x.exp()
    assert order == [3.0, 2.0]
    assert torch.equal(out, 6.0 * x.exp())
    assert seen.ran == [torch.ops.aten.exp.default]


def test_operators_of_backward_and_of_what_it_computes_again_are_seen() -> None:
    seen = Operators()
    x = torch.ones(3, requires_grad=True)
    with observed(nn.Module(), seen):
        checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False).sum().backward()
    names = [op.overloadpacket.__name__ for op in seen.ran]
    assert names.count("sin") == 2
    assert "cos" in names


def test_calls_are_numbered_and_know_what_is_running() -> None:
    calls = Calls()
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with observed(model, calls):
        for _ in range(2):
            model(torch.ones(1, 2))
    once = [
        (Call("", number), ()) if not path else (Call(path, number), (Call("", number),))
        for number in (0, 1)
        for path in ("", "0", "1")
    ]
    assert calls.entered == once
    assert [call.path for call, _ in calls.left] == ["0", "1", ""] * 2


def test_observers_share_calls_and_only_modules_that_one_hears_of_have_hooks() -> None:
    class Running(Observer):
        def __init__(self) -> None:
            self.paths: set[str] = set()

        def modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
            yield "1", model.get_submodule("1")

        def operator(self, run: Run, op: Any, args: Args, kwargs: Kwargs) -> Any:
            self.paths |= {call.path for call in self.running}
            return run(op, args, kwargs)

    model, one = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), Running()
    with observed(model, Operators()):
        assert not has_hooks(model)
    with observed(model, one):
        assert not model._forward_hooks
        assert model[1]._forward_hooks
        model(torch.ones(1, 2))
    assert one.paths == {"1"}
    other = Running()
    with observed(model, other, Calls()):
        model(torch.ones(1, 2))
    assert other.paths == {"", "0", "1"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_that_a_model_catches_ends_the_calls_inside_it(error: type[BaseException]) -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.breaks, self.then = nn.Sequential(Breaks()), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(error):
                self.breaks(x)
            return torch.as_tensor(self.then(x))

    model, calls = Catches(), Calls()
    with observed(model, calls):
        model(torch.ones(1))
        assert not calls.running
    assert calls.left[-1] == (Call("", 0), True)


def test_after_an_error_there_is_no_hook_and_no_mode() -> None:
    ended: list[str] = []

    class Ends(Observer):
        @contextlib.contextmanager
        def around(self, model: nn.Module) -> Iterator[None]:
            try:
                yield
            finally:
                ended.append("around")

    model, seen = nn.Linear(2, 2), Operators()
    with pytest.raises(RuntimeError, match="shapes"), observed(model, Calls(), seen, Ends()):
        model(torch.ones(2, 2) @ torch.ones(2, 3))
    count = len(seen.ran)
    torch.ones(2).exp()
    assert count
    assert len(seen.ran) == count
    assert ended == ["around"]
    assert not has_hooks(model)
