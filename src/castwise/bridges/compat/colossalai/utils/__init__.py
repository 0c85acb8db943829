"""``colossalai.utils``: data loaders, timers, checkpoints and small helpers, in modules named as in Colossal-AI."""

from __future__ import annotations

from castwise.bridges.compat.colossalai.utils.checkpointing import load_checkpoint, save_checkpoint
from castwise.bridges.compat.colossalai.utils.common import (
    free_port,
    is_dp_rank_0,
    is_no_pp_or_last_stage,
    is_tp_rank_0,
    is_using_ddp,
    is_using_pp,
    print_rank_0,
    set_seed,
)
from castwise.bridges.compat.colossalai.utils.cuda import (
    empty_cache,
    get_current_device,
    set_to_cuda,
    synchronize,
)
from castwise.bridges.compat.colossalai.utils.data_sampler import DataParallelSampler, get_dataloader
from castwise.bridges.compat.colossalai.utils.memory import report_memory_usage
from castwise.bridges.compat.colossalai.utils.timer import MultiTimer, Timer
from castwise.bridges.compat.coverage import missing_attribute

__all__ = [
    "DataParallelSampler",
    "MultiTimer",
    "Timer",
    "empty_cache",
    "free_port",
    "get_current_device",
    "get_dataloader",
    "is_dp_rank_0",
    "is_no_pp_or_last_stage",
    "is_tp_rank_0",
    "is_using_ddp",
    "is_using_pp",
    "load_checkpoint",
    "print_rank_0",
    "report_memory_usage",
    "save_checkpoint",
    "set_seed",
    "set_to_cuda",
    "synchronize",
]
__getattr__ = missing_attribute("colossalai.utils")
