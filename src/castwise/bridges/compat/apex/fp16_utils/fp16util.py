"""``apex.fp16_utils.fp16util``: helpers for a training loop that manages an fp16 model and fp32 master weights by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from castwise.bridges.compat.coverage import missing_attribute

__all__ = [
    "BN_convert_float",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

clip_grad_norm = nn.utils.clip_grad_norm_


def to_python_float(t: Any) -> float:
    """Return the value of a tensor with one element as a Python number. The host waits for the device."""
    return float(t.item() if hasattr(t, "item") else t[0])


class tofp16(nn.Module):  # noqa: N801 - Apex's name
    """A module that casts its input to fp16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input in fp16."""
        return input.half()


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert a module's own floating parameters and buffers to ``dtype``. Those of its submodules are unchanged."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a model to ``dtype`` in place, except BatchNorm modules that have weights, and return the model."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802 - Apex's name
    """Convert every BatchNorm of a model that has weights to fp32 in place, and return the model."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.affine:
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Convert a model to fp16, in place, with BatchNorm in fp32.

    Returns:
        An ``nn.Sequential`` that casts its input to fp16, then calls the model.
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the trainable parameters of a model and new fp32 copies of them, called master weights, as two lists.

    Args:
        model: The model.
        flat_master: Whether the second list contains a single flat tensor with the master weights of all parameters.
    """
    params: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    if flat_master:
        flat = nn.utils.parameters_to_vector([p.detach() for p in params]).float()
        flat.requires_grad_()
        flat.grad = torch.zeros_like(flat)
        return params, [flat]
    return params, [p.detach().clone().float().requires_grad_() for p in params]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: list[torch.Tensor], master_params: list[torch.Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of a model's parameters to the fp32 master weights of these parameters."""
    if flat_master:
        grads = [p.grad.reshape(-1) for p in model_params if p.grad is not None]
        master_params[0].grad = torch.cat(grads).float()
        return
    for model, master in zip(model_params, master_params, strict=True):
        master.grad = None if model.grad is None else model.grad.float()


@torch.no_grad()
def master_params_to_model_params(
    model_params: list[torch.Tensor], master_params: list[torch.Tensor], flat_master: bool = False
) -> None:
    """Copy fp32 master weights into the parameters of the model."""
    if flat_master:
        start = 0
        for model in model_params:
            model.copy_(master_params[0][start : start + model.numel()].view_as(model))
            start += model.numel()
        return
    for model, master in zip(model_params, master_params, strict=True):
        model.copy_(master)


__getattr__ = missing_attribute("apex.fp16_utils")
