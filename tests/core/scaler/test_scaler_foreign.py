"""Loss-scaler states of Apex and Colossal-AI, converted in both directions."""

from __future__ import annotations

import pytest
import torch

from castwise import GradScaler
from castwise.core.scaler import from_apex, from_colossalai, to_apex, to_colossalai
from castwise.errors import CheckpointError
from tests.here import DEVICE


def test_apex_states_round_trip() -> None:
    theirs = {
        "loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7},
        "loss_scaler1": {"loss_scale": 16.0, "unskipped": 0},
    }
    scaler = GradScaler(DEVICE)
    scaler.load_state_dict(from_apex(theirs, names=("loss", "second")))
    assert (scaler.get_scale(), scaler.get_scale("second")) == (1024.0, 16.0)
    assert to_apex(scaler.state_dict()) == theirs
    for bad in ({}, {"loss_scaler0": {"scale": 1}}, {"x": {"loss_scale": 1.0, "unskipped": 0}}):
        with pytest.raises(CheckpointError):
            from_apex(bad)


def test_apex_names_are_distinct_and_begin_with_the_default() -> None:
    theirs = {f"loss_scaler{i}": {"loss_scale": 2.0, "unskipped": 0} for i in range(2)}
    for names in (("first", "second"), ("loss", "loss")):
        with pytest.raises(CheckpointError, match="must be 'loss'"):
            from_apex(theirs, names=names)


def test_colossalai_states_round_trip() -> None:
    theirs = {
        "scale": torch.tensor([512.0], device="cpu"),
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "hysteresis": 2,
    }
    scaler = GradScaler(DEVICE, hysteresis=2)
    scaler.load_state_dict(from_colossalai(theirs))
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (512.0, 4.0, 0.25)
    back = to_colossalai(scaler.state_dict())
    assert {key: back[key] for key in theirs} == theirs
    assert back["scale"].shape == theirs["scale"].shape


def test_colossalai_counters_round_trip() -> None:
    full = {
        "scale": torch.tensor([512.0], device="cpu"), "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1000,
        "growth_step": 3, "hysteresis_step": 1, "hysteresis": 4,
    }  # fmt: skip
    scaler = GradScaler(DEVICE, hysteresis=4)
    scaler.load_state_dict(from_colossalai(full))
    assert to_colossalai(scaler.state_dict(), hysteresis=4) == full
    later = from_colossalai({"_scale": 512.0, "_growth_step": 3, "_hysteresis_step": 1})
    assert later == from_colossalai({key: full[key] for key in ("scale", "growth_step", "hysteresis_step")})
    for bad in ({"loss": 1}, {"scale": 1.0, "speed": 2}):
        with pytest.raises(CheckpointError, match="unexpected or missing"):
            from_colossalai(bad)
