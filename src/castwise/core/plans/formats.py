"""Define the numeric formats (fp64, fp32, tf32, bf16, fp16 and fp8) as frozen data.

The numbers are exact: each is a binary fraction that a Python float holds without rounding. The tests compare each with
``torch.finfo`` and with an enumeration of the format's bit patterns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from castwise.core.plans.text import close_matches
from castwise.errors import UnknownNameError

if TYPE_CHECKING:
    import torch

__all__ = ["FORMATS", "LOW", "LOW_DTYPES", "Format", "get_format"]


@dataclass(frozen=True)
class Format:
    """One binary floating-point format.

    Attributes:
        name: castwise's name, such as ``"bf16"``.
        bits: Number of bits of one stored value. tf32 exists only inside a matrix unit and is stored as fp32, so for
            tf32 this is 19, the number of bits that the unit reads.
        exponent_bits: Number of bits of the exponent.
        mantissa_bits: Number of bits of the fraction, without the implicit leading one.
        max: Largest finite value.
        smallest_normal: Smallest positive value with full precision.
        smallest_subnormal: Smallest positive value at all. Devices that flush subnormals to zero (some do for
            tf32 and bf16 inside matrix units) end at ``smallest_normal`` instead.
        eps: Distance from 1 to the next larger value, ``2 ** -mantissa_bits``.
        torch_name: Name of the ``torch`` dtype that stores it.

    Source: IEEE 754-2019 (fp64, fp32, fp16); NVIDIA A100 whitepaper (tf32); Kalamkar et al. 2019,
    arXiv:1905.12322 (bf16); Micikevicius et al. 2022, arXiv:2209.05433 (fp8).
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float
    torch_name: str

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype that stores values of this format (``torch.float32`` for tf32)."""
        import torch  # imported here, since reports need only the numbers and run without torch

        dtype = getattr(torch, self.torch_name)
        assert isinstance(dtype, torch.dtype)
        return dtype


def _ieee(name: str, exponent_bits: int, mantissa_bits: int, torch_name: str) -> Format:
    """Create a format whose largest exponent is reserved for infinities and NaNs, as in IEEE 754."""
    bias = 2 ** (exponent_bits - 1) - 1
    return Format(
        name=name,
        bits=1 + exponent_bits + mantissa_bits,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        max=(2 - 2.0**-mantissa_bits) * 2.0**bias,
        smallest_normal=2.0 ** (1 - bias),
        smallest_subnormal=2.0 ** (1 - bias - mantissa_bits),
        eps=2.0**-mantissa_bits,
        torch_name=torch_name,
    )


FORMATS: Final[Mapping[str, Format]] = MappingProxyType({
    format.name: format
    for format in (
        _ieee("fp64", 11, 52, "float64"),
        _ieee("fp32", 8, 23, "float32"),
        _ieee("tf32", 8, 10, "float32"),
        _ieee("bf16", 8, 7, "bfloat16"),
        _ieee("fp16", 5, 10, "float16"),
        # e4m3fn has no infinities: the largest exponent holds numbers too, and only its last mantissa is NaN.
        # So the largest value is 1.75 * 2**8 and not 1.875 * 2**7.
        Format("fp8_e4m3", 8, 4, 3, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, "float8_e4m3fn"),
        _ieee("fp8_e5m2", 5, 2, "float8_e5m2"),
    )
})
"""Every format, by name."""

LOW: Final = ("bf16", "fp16")
"""The formats other than fp32 in which a model can compute and store its parameters."""

if TYPE_CHECKING:
    LOW_DTYPES: tuple[torch.dtype, ...]
    """The torch dtypes of :data:`LOW`."""


def __getattr__(name: str) -> tuple[torch.dtype, ...]:
    """Create ``LOW_DTYPES`` on first use, so that reports need not import torch."""
    if name != "LOW_DTYPES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return tuple(FORMATS[name].dtype for name in LOW)


def get_format(name_or_dtype: str | torch.dtype | Format) -> Format:
    """Find a format by castwise's name, by torch's name or by dtype.

    Args:
        name_or_dtype: ``"bf16"``, ``"bfloat16"``, ``"torch.bfloat16"``, ``torch.bfloat16`` or a `Format`.

    Returns:
        The format; ``torch.float32`` gives fp32, never tf32.

    Raises:
        UnknownNameError: No such format.
    """
    if isinstance(name_or_dtype, Format):
        return name_or_dtype
    name = str(name_or_dtype).removeprefix("torch.")
    for format in FORMATS.values():
        if name in (format.name, format.torch_name):
            return format
    raise UnknownNameError(
        f"get_format({name_or_dtype!r}): no such format{close_matches(name, FORMATS)}. Allowed: {', '.join(FORMATS)}, "
        "or the torch dtypes of these."
    )
