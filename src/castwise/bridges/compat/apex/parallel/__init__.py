"""``apex.parallel``, implemented with ``torch.nn.parallel``."""

from __future__ import annotations

from castwise.bridges.compat.apex.parallel.distributed import DistributedDataParallel, Reducer
from castwise.bridges.compat.apex.parallel.LARC import LARC
from castwise.bridges.compat.apex.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from castwise.bridges.compat.coverage import missing_attribute

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

__getattr__ = missing_attribute("apex.parallel")
