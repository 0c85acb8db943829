"""Run torch's own kernels exactly: in fp64 on the same inputs, rounded once to the format of the result.

Some kernels round more than once inside: on a CPU the backward of layer norm adds up rows in bf16. The model's code does not cause
this rounding. So an error that vanishes when these kernels are exact is not an error of the model.
"""

from __future__ import annotations

from typing import Any

import torch

from castwise.core import _torch
from castwise.core.casting.trees import tensors_in
from castwise.core.plans.formats import LOW_DTYPES
from castwise.lab.inspect.causes import results_in_fp64
from castwise.lab.inspect.trace import base_name
from castwise.lab.passes.observers import Args, Kwargs, Observer, Run

_LAYERS = (
    "layer_norm", "group_norm", "batch_norm", "rms_norm", "softmax", "gelu", "silu", "embedding", "nll_loss", "mse_loss",
    "l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
)  # fmt: skip
"""Parts of the names of ATen's operators for norms, softmax, activations, embeddings and losses. Sums, means and products are
not included, since the code that calls them chooses their format."""


class ExactKernels(Observer):
    """Replaces the results of torch's kernels for layers, such as layer norm, by exact results that are rounded once.

    Args:
        except_for: Operators for which the plan has a rule of its own; their kernels run unchanged.
    """

    def __init__(self, except_for: tuple[str, ...] = ()) -> None:
        self._except = except_for

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator; if it is a layer's kernel in bf16 or fp16, return the exact result, rounded once."""
        out = run(op, args, kwargs)
        if self._is_kernel(base_name(op)) and any(t.dtype in LOW_DTYPES for t in tensors_in((args, kwargs))):
            exact = results_in_fp64(op, args, kwargs)
            if exact is not None:
                with torch.no_grad():
                    for rounded, wide in zip(tensors_in(out), tensors_in(exact[0]), strict=True):
                        rounded.copy_(wide)
        return out

    def _is_kernel(self, name: str) -> bool:
        return any(layer in name for layer in _LAYERS) and not any(rule in name for rule in self._except)
