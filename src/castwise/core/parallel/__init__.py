"""Support for each kind of parallelism, so that many processes run by one plan.

``wrappers``: detects DistributedDataParallel. ``fsdp``: FSDP2, and its shard groups. ``pipeline``: losses inside
pipeline schedules. ``compression``: gradients sent in bf16 or fp16. ``rendezvous``: how processes meet, also restarted
ones. ``whole``: a whole copy of a sharded model on every rank.
"""

from __future__ import annotations

from castwise.core.parallel.compression import compress_to_bf16, compress_to_fp16
from castwise.core.parallel.rendezvous import init_process_group

__all__ = ["compress_to_bf16", "compress_to_fp16", "init_process_group"]
