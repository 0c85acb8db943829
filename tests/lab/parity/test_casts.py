"""Rounding to a format, compared with a search for the nearest among all values of the format."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from castwise.core.plans.formats import FORMATS, Format
from castwise.lab.parity.casts import SAMPLE, Tally, Values, cast_of

LOW = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")


@functools.cache
def numbers(name: str) -> np.ndarray:
    """Return all finite, non-negative values of a format in ascending order."""
    dtype = FORMATS[name].dtype
    bits = torch.arange(1 << (8 * dtype.itemsize - 1))
    held = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype).double().cpu().numpy()
    return np.sort(held[np.isfinite(held)])


def oracle(values: Tensor, format: Format, scale: float = 1.0) -> tuple[float, ...]:
    """Return the counts of overflowed, subnormal and flushed values and the relative error, computed in fp64."""
    held = numbers(format.name)
    x = values.double().cpu().numpy() * scale
    size = np.abs(x)
    above = np.searchsorted(held, size).clip(1, len(held) - 1)
    down, up = held[above - 1], held[above]
    tie_up = (above % 2) == 0  # the last bit of the n-th value is that of n
    nearest = np.where((size - down < up - size) | ((size - down == up - size) & ~tie_up), down, up)
    last = held[-1] - held[-2]
    even = len(held) % 2 == 1  # the index of the largest value is even, so half a step above it rounds down
    over = size > held[-1] + last / 2 if even else size >= held[-1] + last / 2
    kept, true = nearest[~over], size[~over]
    square = (true**2).sum()
    return (
        float(over.sum()),
        float(((kept > 0) & (kept < format.smallest_normal)).sum()),
        float(((kept == 0) & (true > 0)).sum()),
        math.sqrt(((kept - true) ** 2).sum() / square) if square else 0.0,
    )


def spread(count: int = 20_000) -> Tensor:
    """Return values of all magnitudes that the formats hold, with their limits and ties."""
    x = torch.randn(count) * 2.0 ** torch.empty(count).uniform_(-30, 20)
    edges = [FORMATS[name].max for name in ("fp16", "fp8_e4m3", "fp8_e5m2")]
    ends = [
        *edges,
        65519.0,
        65520.0,
        463.0,
        464.0,
        465.0,
        61439.0,
        61440.0,
        2.0**-25,
        2.0**-10,
        2.0**-17,
        2.0**-25 * 1.01,
        0.0,
    ]
    return torch.cat([x, torch.tensor(ends)])


@pytest.mark.parametrize("scale", [1.0, 2.0**7, 2.0**-11])
@pytest.mark.parametrize("name", LOW)
def test_counts_and_error_are_those_of_exact_rounding(name: str, scale: float) -> None:
    values = spread()
    format = FORMATS[name]
    found = Values.of(values).tally(format, scale)
    over, subnormal, flush, error = oracle(values, format, scale)
    assert (found.overflow, found.subnormal, found.flush) == (over, subnormal, flush)
    assert cast_of([found], name, None).error == pytest.approx(error, rel=1e-9)
    assert over or name == "bf16" or scale < 1.0
    assert flush or name == "bf16"


def test_the_oracle_knows_every_value_of_a_format() -> None:
    for name in LOW:
        held = numbers(name)
        format = FORMATS[name]
        assert held[0] == 0.0
        assert held[1] == format.smallest_subnormal
        assert held[-1] == format.max


def test_what_overflows_is_counted_in_all_of_a_large_tensor_and_the_rest_in_a_sample() -> None:
    values = torch.full((4 * SAMPLE,), 1e-8)
    values[::2] = 1.0
    values[12345] = 1e6
    found = cast_of([Values.of(values).tally(FORMATS["fp16"])], "fp16", None)
    assert found.overflow == 1 / values.numel()
    assert found.flush == pytest.approx(0.5, abs=0.015)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert Values.of(values).some.numel() == SAMPLE
    assert torch.equal(torch.get_rng_state(), before)


def test_tallies_add_up_to_that_of_all_values() -> None:
    one, other = spread(500), spread(300) * 3
    format = FORMATS["fp8_e5m2"]
    both, whole = (
        Values.of(one).tally(format) + Values.of(other).tally(format),
        Values.of(torch.cat([one, other])).tally(format),
    )
    for mine, theirs in zip(vars(both).values(), vars(whole).values(), strict=True):
        assert mine == pytest.approx(theirs)


def test_no_values_at_all() -> None:
    found = Values.of(torch.zeros(0)).tally(FORMATS["fp16"])
    assert found == Tally()
    assert cast_of([found], "fp16", None).error == 0.0
    assert Values.of(torch.zeros(0)).own_scale(FORMATS["fp8_e4m3"]) == 448.0 / 1e-12


def test_values_that_are_not_finite_or_stand_for_it_are_left_out() -> None:
    least = torch.finfo(torch.float32).min
    kept = Values.of(torch.tensor([math.inf, -math.inf, math.nan, least, 3e38, -1.0]))
    assert kept.every.tolist() == [torch.tensor(3e38).item(), -1.0]
    assert Values.of(torch.tensor([3 + 4j, complex(math.inf, 1)])).every.tolist() == [3.0, 4.0, 1.0]
    assert Values.of(torch.ones(2, dtype=torch.float64)).every.dtype is torch.float64


@pytest.mark.parametrize("size", [1e-30, 1e-5, 1.0, 1e30])
def test_a_scale_of_its_own_lets_no_tensor_overflow(size: float) -> None:
    values = torch.randn(1000) * size
    for name in ("fp8_e4m3", "fp8_e5m2"):
        format = FORMATS[name]
        seen = Values.of(values)
        found = cast_of([seen.tally(format, seen.own_scale(format))], name, "tensor")
        assert found.overflow == 0.0
        if size > 1e-12:
            assert found.error < format.eps
        else:
            assert found.flush > 0.9  # too small for the scale in torchao's recipe


def test_underflow_is_what_digits_do_not_explain() -> None:
    values = torch.randn(20_000)
    for name in LOW:
        assert Values.of(values).tally(FORMATS[name]).underflow(name) < 1e-4
    small = Values.of(values * 2.0**-24).tally(FORMATS["fp16"])
    assert small.underflow("fp16") > 0.01
    large = Values.of(values).tally(FORMATS["fp16"])
    assert (small + large).underflow("fp16") < 1e-4
    assert cast_of([small, large], "fp16", None).underflow == small.underflow(
        "fp16"
    )  # ``small`` alone underflows
    assert cast_of([small, large], "fp16", None, least=1e-3).underflow == large.underflow("fp16")
