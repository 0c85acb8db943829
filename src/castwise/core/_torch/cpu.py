"""Features of the CPU."""

from __future__ import annotations

import torch


def cpu_has_bf16() -> bool:
    """Whether oneDNN computes in bf16 on this CPU, which needs at least AVX-512."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cpu_has_tf32() -> bool:
    """Whether oneDNN computes in TF32 on this CPU.

    Without the AMX-TF32 instructions, torch's TF32 settings have no effect.
    """
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return " amx_tf32" in file.read(16384)
    except OSError:
        return False
