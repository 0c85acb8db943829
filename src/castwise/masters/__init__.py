"""Parameters stored low with fp32 masters, for any torch optimizer.

``parameter``: the master itself, which shares its gradient with the parameter. ``attachment``: masters in an
optimizer, kept in step with the model. ``state``: optimizer state under new keys, dtypes and strides.
``weights``: fp32 weights out of a model and into it.
"""

from __future__ import annotations

from castwise.masters.attachment import Attachment, attach, attachment_of
from castwise.masters.parameter import Master, is_low, local, master_of, model_param_of, refresh_master
from castwise.masters.state import move_state, restride_state
from castwise.masters.weights import LoadIntoMasters, fp32_state_dict, install_load_hooks

__all__ = [
    "Attachment",
    "LoadIntoMasters",
    "Master",
    "attach",
    "attachment_of",
    "fp32_state_dict",
    "install_load_hooks",
    "is_low",
    "local",
    "master_of",
    "model_param_of",
    "move_state",
    "refresh_master",
    "restride_state",
]
