"""``colossalai.utils.memory``: reports how much memory is in use."""

from __future__ import annotations

from typing import Any

import torch

from castwise.bridges.compat.colossalai.utils.common import print_rank_0
from castwise.bridges.compat.colossalai.utils.cuda import get_current_device
from castwise.bridges.compat.coverage import missing_attribute

__all__ = ["report_memory_usage"]
__getattr__ = missing_attribute("colossalai.utils")


def report_memory_usage(message: str, logger: Any = None, report_cpu: bool = False) -> None:
    """Print the current and the peak memory of the CUDA device, on rank 0.

    Without a CUDA device, the peak memory of the process is printed.

    Args:
        message: The text in front of the numbers.
        logger: A logger that logs the text instead of printing it, if given.
        report_cpu: Whether the peak memory of the process is printed on a CUDA device too.
    """
    parts = []
    if get_current_device().type == "cuda":
        kinds = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        parts = [
            f"{kind.replace('memory_', '').replace('_', ' ')} {getattr(torch.cuda, kind)() / 2**20:.1f} MiB"
            for kind in kinds
        ]
    if report_cpu or not parts:
        import resource

        parts.append(f"process peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.1f} MiB")
    print_rank_0(f"{message}: {', '.join(parts)}", logger)
