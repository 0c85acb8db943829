"""Find out which matrix units a device has, and which formats they support."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from castwise.core.amounts import listed
from castwise.lab.timing.environment import cpuinfo


@dataclass(frozen=True)
class MatrixUnits:
    """The matrix units of a device.

    Attributes:
        name: ``AMX``, ``Tensor Cores``, ``Matrix Cores``, ``XMX``, ``SME``, ``none`` or ``unknown``.
        formats: Formats that the matrix units support.
        vector_formats: 16-bit formats that vector instructions support. Their speedup is at most the larger number of elements
            per vector.
        sentence: A summary in words.
    """

    name: str
    formats: tuple[str, ...] = ()
    vector_formats: tuple[str, ...] = ()
    sentence: str = ""

    @property
    def present(self) -> bool:
        """Whether the device is known to have matrix units."""
        return self.name not in ("none", "unknown")


def matrix_units(device: torch.device) -> MatrixUnits:
    """Return the matrix units of a device of this machine; their name is ``unknown`` if torch does not report them."""
    if device.type == "cpu":
        return cpu_units(cpu_flags(cpuinfo()))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            return rocm_units(str(getattr(properties, "gcnArchName", "")))
        return cuda_units((properties.major, properties.minor), properties.name)
    if device.type == "xpu" and getattr(
        torch.xpu.get_device_properties(device), "has_subgroup_matrix_multiply_accumulate", False
    ):
        return MatrixUnits("XMX", ("bf16", "fp16"), sentence="XMX: bf16 and fp16")
    return MatrixUnits(
        "unknown", sentence=f"torch does not say which matrix units this {device.type} device has"
    )


# --- CPUs ---------------------------------------------------------------------------------------------------


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Return the instruction sets of the first processor in the text of ``/proc/cpuinfo``, as the kernel spells them.

    They are in the line ``flags`` on x86 and ``Features`` on Arm; without such a line the result is empty.
    """
    match = re.search(r"^(?:flags|Features)[ \t]*:[ \t]*(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def cpu_units(flags: frozenset[str]) -> MatrixUnits:
    """Return the matrix units (AMX or SME) of a CPU, given the CPU's instruction sets.

    AVX-512 BF16 and FP16 are reported as vector instructions.

    Source:
        Intel Architecture Instruction Set Extensions Programming Reference, chapter 3: a tile has 16 rows of 64
        bytes, so a product of bf16 tiles is 16 by 16 by 32.
    """
    if not flags:
        return MatrixUnits("unknown", sentence="this system does not list the CPU's instruction sets")
    vector = []
    if flags & {"avx512_bf16", "avx_ne_convert", "bf16"}:
        vector.append("bf16")
    if flags & {"avx512_fp16", "asimdhp"}:
        vector.append("fp16")
    also = _vector_sentence(flags)
    if "amx_tile" in flags or "amx_bf16" in flags:
        formats = tuple(name for name in ("tf32", "bf16", "fp16") if f"amx_{name}" in flags)
        takes = listed(formats) if formats else "whole numbers alone"
        return MatrixUnits(
            "AMX",
            formats,
            tuple(vector),
            f"AMX: {takes}{also}",
        )
    if "sme" in flags:
        return MatrixUnits("SME", ("bf16", "fp16"), tuple(vector), f"SME: bf16 and fp16{also}")
    return MatrixUnits("none", (), tuple(vector), f"no matrix units{also}")


def _vector_sentence(flags: frozenset[str]) -> str:
    spelled = {
        "avx512_bf16": "AVX-512 BF16", "avx512_fp16": "AVX-512 FP16", "bf16": "Arm BF16", "asimdhp": "Arm FP16"
    }  # fmt: skip
    names = [name for flag, name in spelled.items() if flag in flags]
    if not names:
        return "; no vector instructions for bf16 or fp16 arithmetic"
    plural = "are vector instructions" if len(names) > 1 else "is a set of vector instructions"
    return f"; {listed(names)} {plural}, not matrix units"


# --- GPUs ---------------------------------------------------------------------------------------------------

_TENSOR_CORES: tuple[tuple[int, str, tuple[str, ...]], ...] = (
    (100, "fifth generation", ("tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")),
    (89, "fourth generation", ("tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")),
    (80, "third generation", ("tf32", "bf16", "fp16")),
    (75, "second generation", ("fp16",)),
    (70, "first generation", ("fp16",)),
)
"""Tensor Core generations: the minimum compute capability (major * 10 + minor), the name and the formats of each."""


def cuda_units(capability: tuple[int, int], name: str = "") -> MatrixUnits:
    """Return the Tensor Cores of an NVIDIA GPU.

    Args:
        capability: Compute capability, major and minor.
        name: Name of the GPU, since the GTX 16 series has the capability of the RTX 20 series but no Tensor Cores.

    Source:
        NVIDIA, the table of compute capabilities in the CUDA C++ Programming Guide.
    """
    number = capability[0] * 10 + capability[1]
    if not re.search(r"\bGTX 16\d\d\b", name):
        for least, generation, formats in _TENSOR_CORES:
            if number >= least:
                return MatrixUnits(
                    "Tensor Cores",
                    formats,
                    ("fp16",),
                    f"Tensor Cores, {generation}: {listed(formats)}",
                )
    vector = ("fp16",) if number == 60 or number >= 70 else ()
    return MatrixUnits(
        "none", (), vector, f"no Tensor Cores (compute capability {capability[0]}.{capability[1]})"
    )


def rocm_units(architecture: str) -> MatrixUnits:
    """Return the matrix units of an AMD GPU, given its architecture, such as ``gfx942:sramecc+:xnack-``.

    Source:
        AMD ROCm documentation, "Data types and precision support", hardware table: CDNA has MFMA, RDNA 3 on WMMA.
    """
    gfx = architecture.partition(":")[0]
    cdna = ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")
    if gfx in cdna or re.fullmatch(r"gfx1[12]\d\d", gfx):
        formats = ("bf16", "fp16") if gfx not in cdna[3:] else ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
        return MatrixUnits("Matrix Cores", formats, ("fp16",), f"Matrix Cores: {listed(formats)}")
    if not gfx:
        return MatrixUnits("unknown", sentence="torch does not say which architecture this AMD GPU has")
    return MatrixUnits("none", (), ("fp16",), f"no matrix units ({gfx})")
