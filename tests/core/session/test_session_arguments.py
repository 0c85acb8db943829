"""Errors for wrong arguments of a session and of `prepare` name the call, the value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from castwise import Amp
from castwise.errors import CastwiseError, DeviceError, PlanError, StateError
from tests.here import DEVICE


@pytest.mark.parametrize("methods", [(3,), None, "encode", 7, ("forward", None)], ids=repr)
def test_methods_that_are_no_names(methods: Any) -> None:
    """The error comes before anything changes."""
    model = nn.Linear(2, 2)
    before = dict(vars(model))
    with pytest.raises(StateError, match=r"prepare\(methods=.*Allowed: a sequence of names"):
        Amp("bf16-mixed", device=DEVICE).prepare(model, methods=methods)
    assert vars(model) == before


@pytest.mark.parametrize("device", ["nope", "cpu:x", "", 3.5, object], ids=repr)
def test_a_device_that_is_none(device: Any) -> None:
    """The error is castwise's, whatever torch raises."""
    with pytest.raises(DeviceError, match=r"Amp\(device=.*allowed: cpu"):
        Amp("bf16-mixed", device=device)


@pytest.mark.parametrize("line", ["fp16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("loss", [[torch.ones(())] * 2, 1.0, None], ids=lambda loss: type(loss).__name__)
def test_a_loss_to_be_scaled_that_is_no_tensor(line: str, loss: Any) -> None:
    with pytest.raises(PlanError, match=rf"^scale: the loss is a {type(loss).__name__}; a tensor is needed"):
        Amp(line, device=DEVICE).scale(loss)


@pytest.mark.parametrize("max_norm", ["a", "1.0", [1.0], (2,), -1.0, math.nan, np.ones(2)], ids=repr)
def test_a_norm_to_clip_to_that_is_none(max_norm: Any) -> None:
    model = nn.Linear(2, 2)
    amp = Amp("bf16-mixed", device=DEVICE)
    model, optimizer = amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    amp.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(
        PlanError, match=r"(?s)^step\(max_norm=.*(is not a norm|must be a number >= 0).*Allowed: a number"
    ):
        amp.step(optimizer, max_norm=max_norm)
    with pytest.raises(
        PlanError,
        match=r"(?s)^clip_grad_norm_\(max_norm=.*(is not a norm|must be a number >= 0).*Allowed: a number",
    ):
        amp.clip_grad_norm_(optimizer, max_norm)
    amp.clip_grad_norm_(optimizer, math.inf)
    assert not amp.step(optimizer, max_norm=1).skipped


@pytest.mark.parametrize("group", [1, -100, "world", object()], ids=lambda group: type(group).__name__)
def test_a_group_that_is_none(group: Any) -> None:
    """Includes the number that torch returns to ranks outside of a new group."""
    with pytest.raises(StateError, match=r"Amp\(group=.*Allowed: a process group"):
        Amp("bf16-mixed", device=DEVICE, group=group)


@pytest.mark.parametrize("line", ["fp16-mixed", "O1"])
def test_a_model_cast_to_fp16_after_prepare(line: str) -> None:
    """Its gradients cannot be unscaled; torch's own error says no more than that."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = Amp(line, device=DEVICE)
    amp.prepare(model, optimizer)
    amp.backward(model(torch.ones(2, 4)).square().mean())
    model.half()
    with pytest.raises(CastwiseError, match=r"step\(SGD\).*model\.half\(\)"):
        amp.step(optimizer)
    with pytest.raises(CastwiseError, match=r"forward of this Linear.*model\.half\(\)"):
        model(torch.ones(2, 4))
    with pytest.warns(
        UserWarning, match=r"weight, bias of Linear were cast to float16 after prepare, .* stay in it"
    ):
        amp.close()
