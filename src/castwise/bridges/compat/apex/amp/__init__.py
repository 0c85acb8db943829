"""``apex.amp``, which Apex removed in 2025, implemented with castwise.

    from castwise.compat.apex import amp

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

``frontend`` defines ``initialize``, ``init`` and the state dict. ``properties`` defines the optimization levels, ``O0`` to
``O3``. ``ambient`` casts around operators, as ``O1`` does, and ``functions`` around functions that the user names. ``models``
casts whole models, as the other levels do. ``scaler`` keeps the loss scale, ``stash`` the state of an optimizer, and
``handle`` defines ``scale_loss``. ``opt`` is the optimizer wrapper of Apex's first API.

Source: the contract of NVIDIA/apex at e13873de, the last commit that held ``apex.amp``.
"""

from __future__ import annotations

from castwise.bridges.compat.apex.amp._amp_state import _amp_state, master_params
from castwise.bridges.compat.apex.amp.frontend import init, initialize, load_state_dict, state_dict
from castwise.bridges.compat.apex.amp.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from castwise.bridges.compat.apex.amp.handle import disable_casts, scale_loss
from castwise.bridges.compat.coverage import missing_attribute

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
__getattr__ = missing_attribute("apex.amp")
