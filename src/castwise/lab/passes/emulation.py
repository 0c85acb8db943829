"""Emulate fp16 matrix products on a CPU, fast enough for experiments.

CPUs without fp16 arithmetic run fp16 products many times slower than fp32 products. A test of a GPU plan's gradients does
not need these slow kernels. A GPU's matrix unit takes fp16 operands, sums in fp32 and rounds the result once. That equals
an fp32 product of fp16 values that is rounded to fp16, up to the order of the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from castwise.core import _torch
from castwise.core.casting.trees import map_tensors
from castwise.lab.passes.observers import Args, Kwargs, Observer, Run

_PRODUCTS = frozenset({
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "addbmm", "addmm", "addmv", "baddbmm", "bmm", "convolution", "convolution_backward", "mm", "mv",
})  # fmt: skip
_KEPT = frozenset({"_scaled_dot_product_flash_attention_for_cpu"})
"""Operators of which only the first result is rounded, since their other results are statistics in fp32."""


class EmulatedProducts(Observer):
    """Computes fp16 products on the CPU in fp32 and rounds the results."""

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run the operator; a product of fp16 tensors runs in fp32, and its result is rounded to fp16."""
        name = op.overloadpacket.__name__
        if name not in _PRODUCTS or not any(
            isinstance(a, Tensor) and a.dtype is torch.float16 and a.device.type == "cpu" for a in args
        ):
            return run(op, args, kwargs)
        # an attention mask is passed by keyword
        wide = map_tensors(lambda t: t.float() if t.dtype is torch.float16 else t, (args, kwargs))
        out = run(op, *wide)
        if name in _KEPT:
            return (out[0].half(), *out[1:])
        return map_tensors(lambda t: t.half() if t.dtype is torch.float32 else t, out)
