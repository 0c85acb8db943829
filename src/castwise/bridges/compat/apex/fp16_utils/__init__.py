"""``apex.fp16_utils``: the helpers that scripts import by ``from apex.fp16_utils import *``."""

from __future__ import annotations

from castwise.bridges.compat.apex.fp16_utils.fp16util import (
    BN_convert_float,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
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

__getattr__ = missing_attribute("apex.fp16_utils")
