"""Integrates castwise plans into Hugging Face's Accelerate and into the Trainer of transformers.

:class:`CastwiseAccelerator` is an ``accelerate.Accelerator`` that takes a plan instead of ``mixed_precision``.
:class:`CastwiseTrainer` is a ``transformers.Trainer`` with an argument ``plan``, and :class:`CastwiseMixin` adds this argument
to any subclass of the Trainer. transformers is not imported before one of these two is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from castwise.bridges.trainers.huggingface.accelerator import CastwiseAccelerator
from castwise.bridges.trainers.huggingface.adapters import CastwiseOptimizer

if TYPE_CHECKING:
    from castwise.bridges.trainers.huggingface.trainer import CastwiseMixin, CastwiseTrainer

__all__ = ["CastwiseAccelerator", "CastwiseMixin", "CastwiseOptimizer", "CastwiseTrainer"]


def __getattr__(name: str) -> Any:
    if name not in ("CastwiseMixin", "CastwiseTrainer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from castwise.bridges.trainers.huggingface import trainer

    return getattr(trainer, name)
