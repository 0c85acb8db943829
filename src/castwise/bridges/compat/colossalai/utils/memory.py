"""``colossalai.utils.memory``: reports how much memory is in use."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from castwise.bridges.compat.colossalai.utils.common import print_rank_0
from castwise.bridges.compat.colossalai.utils.cuda import get_current_device
from castwise.bridges.compat.coverage import missing_attribute

__all__ = ["report_memory_usage"]
__getattr__ = missing_attribute("colossalai.utils")


def report_memory_usage(message: str, logger: Any = None, report_cpu: bool = False) -> None:
    """Print the current and the peak memory of this process's accelerator, on rank 0.

    Without an accelerator, or if torch does not count its memory, the peak memory of the process is printed.

    Args:
        message: The text in front of the numbers.
        logger: A logger that logs the text instead of printing it, if given.
        report_cpu: Whether the peak memory of the process is printed on an accelerator too.
    """
    parts = []
    if get_current_device().type != "cpu":
        kinds = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        with contextlib.suppress(RuntimeError):  # torch does not count the memory of some devices
            parts = [
                f"{kind.replace('memory_', '').replace('_', ' ')} {getattr(torch.accelerator, kind)() / 2**20:.1f} MiB"
                for kind in kinds
            ]
    if report_cpu or not parts:
        import resource

        parts.append(f"process peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.1f} MiB")
    print_rank_0(f"{message}: {', '.join(parts)}", logger)
