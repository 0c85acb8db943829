"""What the process that tests fork has imported."""

from __future__ import annotations

# ruff: noqa: F401
import gc

import matplotlib.backends.backend_agg
import matplotlib.figure
import pytest
import sklearn.datasets
import torch._dynamo.backends.debugging
import torch._functorch.aot_autograd
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.run
import torch.distributed.tensor.parallel
import torch.utils.tensorboard

import castwise.cli
import castwise.compat.apex
import castwise.jobs.train
import castwise.jobs.tune

gc.collect()
gc.freeze()  # a fork then copies none of it where its collector looks
