"""Every fix in a dtype error message of torch's operators works, tried on torch's own operator samples."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise.core.casting.trees import map_tensors
from tests.here import DEVICE
from tests.soak import every

PARTS = 48
PLANS = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16, "bf16-true": torch.bfloat16}
LOW: dict[str, Callable[[int], bool]] = {
    "all": lambda index: True, "first": lambda index: index == 0, "rest": lambda index: index > 0,
}  # fmt: skip
"""Selects which floating tensors of an operator are low."""


class Calls(nn.Module):
    """Calls any function it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.call: Callable[..., Any] = torch.exp
        self.given: list[Any] = []
        self.named: dict[str, Any] = {}
        self.autocast = True

    def forward(self) -> None:
        if self.autocast:
            self.call(*self.given, **self.named)
            return
        with torch.autocast(DEVICE, enabled=False):
            self.call(*self.given, **self.named)


@pytest.fixture(scope="module")
def samples() -> list[Any]:
    """Return torch's table of operators with sample inputs. Its module imports expecttest, of which a stub is enough."""
    lacking = "expecttest" not in sys.modules
    if lacking:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            home = importlib.import_module("torch.testing._internal.common_methods_invocations")
    finally:
        if lacking:
            del sys.modules["expecttest"]
        # The import makes later changes of torch.backends flags fail; undo that. The module attribute hides the
        # function's module.
        torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    kind = "cuda" if DEVICE == "cuda" else "cpu"  # the simulated device has the CPU's kernels
    return [op for op in home.op_db if torch.float32 in op.supported_dtypes(kind)]


def with_low(value: Any, low: Callable[[int], bool], dtype: torch.dtype) -> Any:
    """Copy all tensors, some floating ones in a low dtype."""
    count = itertools.count()

    def copy(tensor: Tensor) -> Tensor:
        made = tensor.detach().clone()
        return made.to(dtype) if made.is_floating_point() and low(next(count)) else made

    return map_tensors(copy, value)


def run(
    plan: str, call: Callable[..., Any], given: list[Any], named: dict[str, Any], autocast: bool = True
) -> None:
    model = Calls()
    model.call, model.given, model.named, model.autocast = call, given, named, autocast
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model)
        model()


def wrong(
    plan: str, call: Callable[..., Any], given: list[Any], named: dict[str, Any], said: str
) -> Iterator[str]:
    """Yield what is wrong with the advice about a call, by following it."""
    operator, _, advice = said.partition(". ")
    rules = (
        re.findall(r"(ops\.[\w:]+=\w+)", advice.partition(" to the plan, as in ")[0])
        if "as in" in advice
        else []
    )
    for rule in rules:
        try:
            run(f"{plan}+{rule}", call, given, named)
        except Exception as error:
            later = str(error).rpartition("castwise: ")[2].partition(". ")[0]
            if later == operator or not later:  # otherwise the next call fails, with its own advice
                yield f"{rule} does not fix the error: {error}"
    write = r"self\.(given|named)\[('\w+'|\d+)\](?:\[(\d+)\])?\.to\(torch\.(\w+)\)"
    casts = re.findall(write, advice)
    if casts:
        new_given, new_named = list(given), dict(named)
        for home, key, item, dtype in casts:
            place: Any = new_given if home == "given" else new_named
            index: Any = int(key) if home == "given" else key.strip("'")
            if item:
                place[index] = list(place[index])
                place, index = place[index], int(item)
            place[index] = place[index].to(getattr(torch, dtype))
        if "cast what" not in advice:
            try:
                run(plan, call, new_given, new_named, autocast="enabled=False" not in advice)
            except Exception as error:
                yield f"the advised code does not fix the error: {error}"
    elif not rules and not re.search(r"torch\.\w+.* in line \d+", advice):
        yield "it names no fix, and no line with a dtype"


@every(16)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")  # operators give many warnings, which differ between releases
def test_the_printed_cure_cures(part: int, samples: list[Any]) -> None:
    torch.manual_seed(part)
    found, tried = [], 0
    for op in samples[part::PARTS]:
        if DEVICE == "sim" and op.name.startswith("sparse."):
            continue  # it has no sparse tensors
        for sample in itertools.islice(op.sample_inputs(DEVICE, torch.float32), 2):
            whole = ([sample.input, *sample.args], dict(sample.kwargs))
            for (plan, dtype), (kind, low) in itertools.product(PLANS.items(), LOW.items()):
                given, named = with_low(whole, low, dtype)
                try:
                    run(plan, op.op, given, named)
                    continue
                except Exception as error:
                    said = str(error)
                try:
                    op.op(*with_low(whole, lambda index: False, dtype)[0], **sample.kwargs)
                except Exception:  # it fails for another reason than dtypes
                    continue
                given, named = with_low(whole, low, dtype)
                tried += 1
                _, ours, advice = said.partition("\ncastwise: ")
                problems = list(wrong(plan, op.op, given, named, advice)) if ours else ["nothing is said"]
                found += [
                    f"{op.name} with {kind} low under {plan}: {problem}\n{said}" for problem in problems
                ]
    assert not found, "\n\n".join(found)
    assert tried or part  # in some parts, all operators accept mixed dtypes
