"""What programs beside this file have installed: it imports Apex by itself, as timm and transformers do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import torch

try:
    from apex import amp
except ImportError:
    amp = None


def is_apex_available() -> bool:
    return importlib.util.find_spec("apex") is not None


class ApexScaler:
    """Backward, clipping and step of one loss."""

    state_dict_key = "amp"

    def __call__(self, loss: torch.Tensor, optimizer: Any, clip_grad: float | None = None) -> None:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip_grad)
        optimizer.step()


class Trainer:
    """Loops over batches; a class made from it takes the steps."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def train(self, batches: Iterable[Any]) -> list[float]:
        return [self.training_step(*batch) for batch in batches]

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        raise NotImplementedError
