"""Outputs are named, get a kind by the documented rule, and their differences are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from castwise.lab.serve import outputs
from castwise.lab.serve.outputs import (
    Difference,
    difference,
    kind_of,
    mean_difference,
    named_outputs,
    rank_correlation,
    sampled,
    spread,
)


@dataclass
class Found:
    boxes: Tensor
    more: Any


def test_nested_outputs_are_named() -> None:
    a, b, c = torch.zeros(2), torch.zeros(3), torch.zeros(4)
    named = named_outputs({"logits": a, "hidden": (b, [c]), "again": a, "text": "x", "none": None})
    assert list(named) == ["logits", "hidden.0", "hidden.1.0", "again"]
    assert list(named_outputs(Found(a, {"k": b}))) == ["boxes", "more.k"]
    assert list(named_outputs(a)) == ["output"]
    assert named_outputs("text") == {}


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "kind"),
    [
        ("output", (8,), torch.float32, "scores"),
        ("output", (8, 1), torch.float32, "scores"),
        ("output", (8, 5), torch.float32, "logits"),
        ("logits", (8, 7, 5), torch.float32, "logits"),
        ("last_hidden_state", (8, 7, 5), torch.float32, "values"),
        ("text_embeds", (8, 5), torch.float32, "values"),
        ("images", (8, 3, 4, 4), torch.float32, "values"),
        ("loss", (), torch.float32, "values"),
        ("tokens", (8, 5), torch.int64, "integers"),
        ("mask", (8,), torch.bool, "integers"),
    ],
)
def test_kinds(name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    assert kind_of(name, torch.zeros(shape, dtype=dtype)) == kind


def test_logits() -> None:
    fp32 = torch.tensor([[1.0, 0.0], [1.0, 0.9], [0.0, 5.0]])
    other = torch.tensor([[1.0, 0.5], [0.8, 0.9], [6.0, 5.0]])
    found = difference(fp32, other, "logits", torch.full((3,), 0.5))
    assert found.error == pytest.approx(0.25 + 0.04 + 36)
    assert (found.decisions, found.changed, found.unexplained, found.top) == (3, 2, 1, None)
    p = fp32.double().softmax(1)
    divergence = (p * (p.log() - other.double().log_softmax(1))).sum(1)
    torch.testing.assert_close(found.divergence, divergence)
    assert found.noise is not None
    whole = math.sqrt((0.25 + 0.04 + 36) / 6)
    torch.testing.assert_close(found.noise, torch.tensor([whole, whole, math.sqrt(18)], dtype=torch.float64))


def test_probabilities_are_compared_as_probabilities() -> None:
    logits, other = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    found = difference(logits.softmax(1), other.softmax(1), "logits").divergence
    torch.testing.assert_close(found, difference(logits, other, "logits").divergence)


def test_top_five() -> None:
    fp32 = torch.arange(8.0).flip(0).repeat(2, 1)
    other = fp32.clone()
    other[0, 5] = 3.5  # enters the five largest in place of 3
    other[1, 0] = 6.5  # still among them
    assert difference(fp32, other, "logits").top == 1


def test_what_is_not_finite() -> None:
    fp32 = torch.tensor([1.0, math.inf, -1e38, 2.0])
    other = torch.tensor([math.nan, 0.0, -math.inf, 4.0])
    found = difference(fp32, other, "values")
    assert (found.elements, found.nonfinite, found.error, found.signal) == (2, 1, 4.0, 5.0)


def test_integers_and_other_shapes() -> None:
    fp32 = torch.tensor([1, 2, 3])
    assert difference(fp32, torch.tensor([1, 0, 3]), "integers").changed == 1
    reshaped = difference(fp32, torch.tensor([1, 2]), "integers")
    assert (reshaped.reshaped, reshaped.changed) == (True, 3)
    assert difference(torch.ones(4), torch.ones(2), "values").error == 4.0


def test_spread_ignores_what_no_decision_sees() -> None:
    rows = torch.randn(5, 3)
    assert spread(rows + 100.0, "logits") == pytest.approx(spread(rows, "logits"), rel=1e-4)
    assert spread(torch.tensor([2.0, 4.0]), "scores", 3.0) == 2.0


def test_rank_correlation() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(x, x.exp()) == pytest.approx(1.0)
    assert rank_correlation(x, -x) == pytest.approx(-1.0)
    # 1 2 3 4 against 1 3 2 4: 1 - 6 * 2 / (4 * 15)
    assert rank_correlation(x, torch.tensor([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)
    assert rank_correlation(x, torch.ones(4)) is None


def test_large_outputs_are_sampled_in_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MOST_ELEMENTS", 40)
    rows = torch.arange(100.0).repeat(4, 1).T.contiguous()
    one, other = sampled(rows, "logits"), sampled(rows + 1, "logits")
    assert one.shape == (10, 4)
    assert bool((other == one + 1).all())
    assert sampled(rows, "values").shape == (40,)


def test_the_mean_of_differences() -> None:
    one, other = Difference(3, 1.0, 9.0, changed=1), Difference(3, 3.0, 9.0, changed=0)
    mean = mean_difference([one, other])
    assert (mean.error, mean.changed, mean.signal) == (2.0, 0.5, 9.0)
