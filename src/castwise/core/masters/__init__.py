"""Give parameters that are stored in bf16 or fp16 fp32 master weights, in any torch optimizer.

A master is the fp32 copy of a parameter, which the optimizer updates instead of the parameter. ``parameter`` defines
masters, which share their gradient and attributes with the parameter. ``originals`` keeps the fp32 values of
parameters without a master. ``attachment`` manages the masters of an optimizer, ``pairs`` keeps masters and model
equal, and ``step_hooks`` has the hooks around each step. ``following``, ``writes`` and ``sample`` find writes to
parameters that torch's version counters miss. ``sync`` has the hooks before a model is read. ``state`` converts
optimizer state. ``weights`` reads and writes the fp32 weights of a model. ``files`` puts masters into
``optimizer.state_dict()``. ``averages`` has averages of weights, and ``copies`` finds averages whose updates would be
rounded away. ``pickles`` pickles models and optimizers without castwise. ``updates`` has the update rules of LAMB and
NovoGrad.
"""

from __future__ import annotations

from castwise.core.masters.attachment import Attachment, attach, attachment_of, copy_to_model, refresh_master
from castwise.core.masters.averages import AveragedModel
from castwise.core.masters.files import forget_loaded, without_masters
from castwise.core.masters.originals import (
    fit_grad,
    forget_former,
    forget_original,
    former_dtype,
    is_low,
    is_written,
    local,
    note_former,
    original_of,
    remember_original,
    restore,
    store,
)
from castwise.core.masters.parameter import Master, master_of, model_param_of
from castwise.core.masters.pickles import OfThisProcess, make_pickles_plain
from castwise.core.masters.state import move_state, restride_state
from castwise.core.masters.weights import fp32_state_dict, install_hooks

__all__ = [
    "Attachment",
    "AveragedModel",
    "Master",
    "OfThisProcess",
    "attach",
    "attachment_of",
    "copy_to_model",
    "fit_grad",
    "forget_former",
    "forget_loaded",
    "forget_original",
    "former_dtype",
    "fp32_state_dict",
    "install_hooks",
    "is_low",
    "is_written",
    "local",
    "make_pickles_plain",
    "master_of",
    "model_param_of",
    "move_state",
    "note_former",
    "original_of",
    "refresh_master",
    "remember_original",
    "restore",
    "restride_state",
    "store",
    "without_masters",
]
