"""What the process that tests fork has imported."""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import torch._dynamo.backends.debugging
import torch._functorch.aot_autograd
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.run
import torch.distributed.tensor.parallel
import torch.utils.tensorboard  # noqa: F401

import castwise.cli
import castwise.compat.apex
import castwise.jobs.train
import castwise.jobs.tune  # noqa: F401

gc.collect()
gc.freeze()  # a fork then copies none of it where its collector looks
