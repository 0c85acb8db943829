"""Which errors say that a plan cannot run, by errors that torch really raises."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from castwise.errors import DeviceError, PlanError, RankError, WorkloadError
from castwise.measure.failures import cannot_run, unfit

LOW = torch.ones(2, 2, dtype=torch.bfloat16)
WIDE = torch.ones(2, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.special.airy_ai(LOW),
        lambda: torch.linalg.inv(LOW),
        lambda: torch.fft.rfft(LOW),
        lambda: torch.mm(LOW, WIDE),
        lambda: functional.conv2d(LOW[None, None], torch.ones(1, 1, 1, 1)),
        lambda: LOW.numpy(),
    ],
    ids=["airy_ai", "inv", "rfft", "mm", "conv2d", "numpy"],
)
def test_what_torch_lacks_for_a_dtype(call: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        call()
    assert cannot_run(caught.value)
    assert unfit(caught.value).startswith("not supported by this device: ")


@pytest.mark.parametrize(
    "call",
    [
        lambda: {}["key"],
        lambda: torch.mm(WIDE, torch.ones(3, 3)),
        lambda: WIDE.sum().backward(),
        lambda: [] + 1,  # type: ignore[operator]
        lambda: torch.ones(2).view(3),
    ],
    ids=["key", "shapes", "no graph", "types", "view"],
)
def test_faults_of_the_code(call: Callable[[], object]) -> None:
    with pytest.raises((LookupError, RuntimeError, TypeError)) as caught:
        call()
    assert not cannot_run(caught.value)
    assert unfit(caught.value).startswith(f"{type(caught.value).__name__}: ")


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.distributions.Categorical(logits=torch.full((2,), float("nan")), validate_args=True),
        lambda: math.sqrt(-1.0),
        lambda: math.exp(1e4),
    ],
    ids=["distribution", "domain", "overflow"],
)
def test_checks_of_the_models_own(call: Callable[[], object]) -> None:
    """Numbers that a format made, refused: no fault of the code, and said by its own name."""
    with pytest.raises((ValueError, ArithmeticError)) as caught:
        call()
    assert cannot_run(caught.value)
    assert unfit(caught.value).startswith(f"{type(caught.value).__name__}: ")


def test_castwises_own_errors() -> None:
    assert cannot_run(PlanError("no such module"))
    assert cannot_run(DeviceError("no bf16"))
    assert cannot_run(MemoryError())
    assert not cannot_run(WorkloadError("the batches ended"))
    assert [cannot_run(RankError("one failed", cannot_run=lacking)) for lacking in (False, True)] == [
        False,
        True,
    ]
