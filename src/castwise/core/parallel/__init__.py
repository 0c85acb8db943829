"""Support the kinds of parallelism of PyTorch, so that many processes train under one plan.

- ``wrappers`` detects DistributedDataParallel and FSDP1.
- ``fsdp`` makes the mixed-precision policies of FSDP2 from a plan.
- ``pipeline`` scales the losses inside pipeline schedules.
- ``compression`` sends gradients in bf16 or fp16.
- ``rendezvous`` starts ``torch.distributed``, also in restarted processes.
- ``whole`` makes a whole copy of a sharded model on every rank.
"""

from __future__ import annotations

from castwise.core.parallel.compression import compress_to_bf16, compress_to_fp16
from castwise.core.parallel.rendezvous import init_process_group

__all__ = ["compress_to_bf16", "compress_to_fp16", "init_process_group"]
