"""Formats against torch.finfo and against every value that a 16-bit or 8-bit format has."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from castwise.core.plans.formats import FORMATS, LOW, Format, get_format
from castwise.errors import PlanError, UnknownNameError

STORED = [name for name in FORMATS if name != "tf32"]  # tf32 has no torch dtype of its own


@pytest.mark.parametrize("name", STORED)
def test_agrees_with_finfo(name: str) -> None:
    format, info = FORMATS[name], torch.finfo(FORMATS[name].dtype)
    assert (format.bits, format.max, format.eps) == (info.bits, info.max, info.eps)
    assert format.smallest_normal == info.smallest_normal
    assert format.bits == 1 + format.exponent_bits + format.mantissa_bits


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
def test_agrees_with_every_value_there_is(name: str) -> None:
    format = FORMATS[name]
    integer = {8: torch.uint8, 16: torch.int16}[format.bits]
    patterns = torch.arange(2 ** (format.bits - 1), dtype=torch.int32)  # sign bit 0: values in rising order
    values = patterns.to(integer).view(format.dtype).double()
    finite = values[values.isfinite()]
    assert finite.max().item() == format.max
    assert values[1].item() == format.smallest_subnormal
    first_normal = 2**format.mantissa_bits  # exponent field 1, fraction 0
    assert values[first_normal].item() == format.smallest_normal
    one = int((values == 1).nonzero().item())
    assert (values[one + 1] - values[one]).item() == format.eps
    assert torch.equal(finite, finite.sort().values)
    has_infinity = bool(values.isinf().any())
    assert has_infinity == (name != "fp8_e4m3")


@pytest.mark.parametrize("name", ["fp64", "fp32"])
def test_wide_formats_end_where_their_bit_patterns_do(name: str) -> None:
    format = FORMATS[name]
    integer = {32: torch.int32, 64: torch.int64}[format.bits]
    infinity = (2**format.exponent_bits - 1) << format.mantissa_bits
    bits = torch.tensor([1, 2**format.mantissa_bits, infinity - 1], dtype=integer)
    expected = [format.smallest_subnormal, format.smallest_normal, format.max]
    assert bits.view(format.dtype).double().tolist() == expected


def test_tf32_is_fp32_without_the_last_13_bits_of_the_fraction() -> None:
    tf32, fp32 = FORMATS["tf32"], FORMATS["fp32"]
    assert (tf32.exponent_bits, tf32.mantissa_bits, tf32.bits) == (8, 10, 19)
    assert tf32.dtype is torch.float32
    lost = fp32.mantissa_bits - tf32.mantissa_bits
    largest = 0x7F7FFFFF >> lost << lost
    bits = torch.tensor([1 << lost, 0x00800000, largest], dtype=torch.int32)
    expected = [tf32.smallest_subnormal, tf32.smallest_normal, tf32.max]
    assert bits.view(torch.float32).double().tolist() == expected
    assert tf32.eps == fp32.eps * 2**lost == FORMATS["fp16"].eps


def test_bounds_are_exact_binary_fractions() -> None:
    for format in FORMATS.values():
        for value in (format.max, format.smallest_normal, format.smallest_subnormal, format.eps):
            mantissa, _ = math.frexp(value)
            assert (mantissa * 2**53).is_integer()


@pytest.mark.parametrize("name", list(FORMATS))
def test_found_by_every_name(name: str) -> None:
    format = FORMATS[name]
    assert get_format(name) is format
    assert get_format(format) is format
    if name != "tf32":
        assert get_format(format.dtype) is format
        assert get_format(format.torch_name) is format
        assert get_format(f"torch.{format.torch_name}") is format


def test_float32_is_never_tf32() -> None:
    assert get_format(torch.float32).name == "fp32"


@pytest.mark.parametrize("value", ["bf61", "half", "", torch.int8, None, 16])
def test_unknown_format_names_the_value_and_the_choice(value: object) -> None:
    with pytest.raises(UnknownNameError) as error:
        get_format(value)  # type: ignore[arg-type]
    assert f"get_format({value!r})" in str(error.value)
    assert "Allowed: fp64, fp32, tf32, bf16, fp16, fp8_e4m3, fp8_e5m2" in str(error.value)
    assert isinstance(error.value, PlanError)


def test_unknown_format_suggests_a_close_one() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'bf16'"):
        get_format("bf61")


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["bf16"].max = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        FORMATS["bf16"] = FORMATS["fp16"]  # type: ignore[index]
    assert isinstance(hash(FORMATS["bf16"]), int)
    assert all(isinstance(FORMATS[name], Format) for name in LOW)
