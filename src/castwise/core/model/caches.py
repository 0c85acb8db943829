"""Keep the keys and values of a generate loop in the format in which attention reads them.

A model that turns its keys by tables of sines in fp32, as Llama does, hands fp32 keys and bf16 values to its cache. The cache
stores both in fp32, or fails if it was allocated in one format. But attention under a plan that autocasts reads them in the plan's
format, so rounding them once, when they come into the cache, gives the same results with half the memory.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from castwise.core import _torch
from castwise.core.casting import frames

_READERS = ("scaled_dot_product_attention", "matmul", "bmm", "baddbmm")
"""The operators by which attention reads keys and values."""
_begun: list[_torch.hooks.Replacement] = []
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models for which caches are changed."""


def _rounding(update: Callable[..., Any]) -> Callable[..., Any]:
    def rounded(cache: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and _attention_is_low():
            args = (*map(_rounded, args[:2]), *args[2:])
            kwargs |= {
                name: _rounded(kwargs[name]) for name in ("key_states", "value_states") if name in kwargs
            }
        return update(cache, *args, **kwargs)

    return rounded


def _attention_is_low() -> bool:
    """Whether the plan that is active autocasts, and runs the operators that read a cache in its format."""
    frame = frames.thread.state.frame
    return (
        frame is not None
        and frame.enabled
        and all(
            row.rule in ("lower", "unfused", "native") for op, row in frame.rows.items() if op in _READERS
        )
    )


def _rounded(states: Any) -> Any:
    if isinstance(states, torch.Tensor) and torch.is_autocast_enabled(kind := states.device.type):
        return states.to(torch.get_autocast_dtype(kind)) if states.dtype is torch.float32 else states
    return states


def begin(model: nn.Module, log: Callable[[Callable[[], None]], object]) -> None:
    """Make the caches of ``transformers``, if it is imported, store keys and values in the format of autocasting.

    This concerns calls without gradients under a plan whose attention runs in its format.

    Args:
        model: The model that needs it. It is held weakly.
        log: Called with a function that ends it, unless another model needs it.
    """
    module = sys.modules.get("transformers.cache_utils")
    home = getattr(module, "Cache", None)
    if not isinstance(home, type) or "update" not in vars(home):
        return
    log(functools.partial(_end, weakref.ref(model)))
    _models.add(model)
    if not _begun:
        _begun.append(_torch.hooks.Replacement(home, "update", _rounding))
    _begun[0].begin()


def _end(model: weakref.ref[nn.Module]) -> None:
    """Put back the methods of the caches if this was the last model. It may be called twice."""
    if (alive := model()) is not None:
        _models.discard(alive)
    if not _models and _begun:
        _begun[0].end()
        _begun.clear()
