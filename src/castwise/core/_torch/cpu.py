"""What a CPU can do."""

from __future__ import annotations

import torch


def cpu_has_bf16() -> bool:
    """Whether oneDNN computes in bf16 on this CPU (AVX-512 at least)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cpu_has_tf32() -> bool:
    """Whether oneDNN computes in TF32 on this CPU: it needs AMX-TF32, and is a silent no-op without."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return " amx_tf32" in file.read(16384)
    except OSError:
        return False
