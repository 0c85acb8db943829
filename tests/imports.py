"""Imports of the process that tests are forked from."""

from __future__ import annotations

# ruff: noqa: E402, F401
import gc
import os

os.environ["TORCH_WARM_POOL"] = "0"  # otherwise Inductor starts processes if Triton is installed

import matplotlib.backends.backend_agg
import matplotlib.figure
import pytest
import rich.markdown
import sklearn.datasets
import tqdm

tqdm.tqdm.monitor_interval = 0  # starts no thread, which a fork would lose

import torch._dynamo.backends.debugging
import torch._functorch.aot_autograd
import torch._inductor.pattern_matcher
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.run
import torch.distributed.tensor.parallel
import torch.utils.tensorboard

import castwise.bridges.compat.apex.amp
import castwise.bridges.compat.colossalai
import castwise.commands.cli
import castwise.commands.jobs.stages
import castwise.commands.jobs.train
import castwise.commands.jobs.tune
import castwise.lab.workloads.gpt
import castwise.report.train
import tests.here
from castwise.lab.workloads import digits

digits.split()  # reads the data once
gc.collect()
gc.freeze()  # so that garbage collections in a fork do not copy these pages
