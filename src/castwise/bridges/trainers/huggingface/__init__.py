"""A plan in Hugging Face's Accelerate and in the Trainer of transformers.

:class:`CastwiseAccelerator` is an ``accelerate.Accelerator`` with a plan in the place of ``mixed_precision``;
:class:`CastwiseTrainer` is a ``transformers.Trainer`` with a ``plan=``, and :class:`CastwiseMixin` makes one of any other
trainer that is derived from it. transformers is imported when the trainer is.
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
