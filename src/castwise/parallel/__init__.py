"""Many processes, one plan: the one place where ranks agree, and what each kind of parallelism needs.

``agreement``: non-finite flags and global norms over ranks. ``pieces``: which parameters are cut, and into how many.
``wrappers``: DistributedDataParallel and FSDP2, recognised. ``pipeline``: losses inside pipeline schedules.
``compression``: gradients sent in bf16 or fp16. ``plans``: ranks that were given different plans.
"""

from __future__ import annotations

from castwise.parallel.agreement import Agreement
from castwise.parallel.compression import compress_to_bf16, compress_to_fp16
from castwise.parallel.pieces import Pieces

__all__ = ["Agreement", "Pieces", "compress_to_bf16", "compress_to_fp16"]
