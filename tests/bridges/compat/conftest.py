"""The state of a drop-in is the process's: each test begins with none."""

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
    """As before the first ``initialize``, and nothing left in force after the test."""
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
    frames._kept.clear()  # those of blocks, kept for their backward passes
    assert not kernels.registered("cpu")
    assert {name: vars(torch.Tensor).get(name) for name in methods} == methods
