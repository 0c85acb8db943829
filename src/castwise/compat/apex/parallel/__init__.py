"""``apex.parallel`` on ``torch.nn.parallel``."""

from __future__ import annotations

from castwise.compat.apex._missing import missing
from castwise.compat.apex.parallel.distributed import DistributedDataParallel, Reducer
from castwise.compat.apex.parallel.LARC import LARC
from castwise.compat.apex.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

INSTEAD = {"multiproc": "start processes with torchrun"}
"""What to use in the place of what is missing."""

__getattr__ = missing(__name__, INSTEAD)
