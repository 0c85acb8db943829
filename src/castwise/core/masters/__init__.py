"""Parameters stored low with fp32 masters, for any torch optimizer.

``parameter``: the master, which shares its gradient and attributes with the parameter. ``originals``: fp32 values of
parameters without a master. ``attachment``: the masters of an optimizer; ``pairs``: keeps masters and model equal;
``steps``: hooks at each step. ``following``, ``writes``, ``sample``: writes that torch does not count. ``sync``: hooks
before a model is read. ``state``: optimizer state under new keys, dtypes and strides. ``weights``: reads and writes
fp32 weights of a model. ``files``: masters in the state dicts of any loop. ``averages``: averages of weights;
``copies``: averages whose updates would be rounded away. ``pickles``: of models and optimizers.
"""

from __future__ import annotations

from castwise.core.masters.attachment import Attachment, attach, attachment_of, copy_to_model, refresh_master
from castwise.core.masters.averages import AveragedModel
from castwise.core.masters.files import forget_loaded, without_masters
from castwise.core.masters.originals import (
    fit_grad,
    forget_former,
    forget_original,
    is_low,
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
    "fp32_state_dict",
    "install_hooks",
    "is_low",
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
