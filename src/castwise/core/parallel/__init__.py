"""Many processes, one plan: what each kind of parallelism needs.

``wrappers``: DistributedDataParallel, recognised. ``fsdp``: FSDP2, and its shard groups. ``pipeline``: losses inside pipeline
schedules. ``compression``: gradients sent in bf16 or fp16. ``rendezvous``: where processes meet, restarted ones too. ``whole``: a
whole copy of a model that is cut, on every rank.
"""

from __future__ import annotations

from castwise.core.parallel.compression import compress_to_bf16, compress_to_fp16
from castwise.core.parallel.rendezvous import init_process_group

__all__ = ["compress_to_bf16", "compress_to_fp16", "init_process_group"]
