"""Drop-ins have process-wide state; each test starts without any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from castwise.bridges.compat.apex import amp
from castwise.bridges.compat.apex.amp import functions
from castwise.bridges.compat.apex.amp._amp_state import AmpState
from castwise.core.casting import frames, kernels


@pytest.fixture(autouse=True)
def fresh_amp() -> Iterator[None]:
    """Reset the state after each test, and check that no casts are left active."""
    state = amp._amp_state
    methods = {
        name: vars(torch.Tensor).get(name)
        for name in ("cpu", "__ipow__", "__iadd__", "__itruediv__", "addmm_")
    }
    yield
    if state.handle is not None:
        state.handle._deactivate()
    functions._registered.clear()
    vars(state).clear()
    vars(state).update(vars(AmpState()))
    assert not frames.ambient
    assert frames.depth() == 0
    frames._kept.clear()  # frames of blocks, kept for backward
    assert not kernels.registered("cpu")
    assert {name: vars(torch.Tensor).get(name) for name in methods} == methods
