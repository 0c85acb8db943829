"""The conversion of Colossal-AI's mode options to plans."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from castwise.bridges.compat.colossalai.amp import AMP_TYPE
from castwise.bridges.compat.colossalai.plans import recipe_of
from castwise.bridges.compat.colossalai.sharding import zero_recipe
from castwise.core.plans.plan import PRESETS, LossScale, Plan, Region
from castwise.errors import PlanError, UnknownNameError

ALL_LOW = (Region("**", params="fp16"),)
"""Buffers and BatchNorm statistics in fp16, as in the originals; castwise's own presets keep them in fp32."""
LOW_BUT_NORMS = (*ALL_LOW, Region("type:_BatchNorm", params="fp32"))


def plan(mode: AMP_TYPE, **options: Any) -> Plan:
    return recipe_of(mode, options).plan


def test_the_torch_mode_is_cudas_autocast_with_torchs_scaler() -> None:
    recipe = recipe_of(AMP_TYPE.TORCH)
    assert recipe.plan == Plan(compute="fp16", rules="cuda", output="as_is", loss_scale=LossScale())
    assert recipe.covers_loss
    said = plan(AMP_TYPE.TORCH, init_scale=2.0**20, growth_factor=3, backoff_factor=0.25, growth_interval=7)
    assert said.loss_scale == LossScale(init=2.0**20, growth=3.0, backoff=0.25, interval=7)
    off = plan(AMP_TYPE.TORCH, enabled=False)
    assert off.loss_scale is None
    assert off.autocasts


def test_the_naive_mode_is_fp16_throughout_with_masters() -> None:
    recipe = recipe_of("naive")
    assert recipe.plan == dataclasses.replace(PRESETS["naive"], regions=ALL_LOW)
    assert not recipe.covers_loss
    scale = recipe.plan.loss_scale
    assert scale is not None
    assert (scale.init, scale.interval, scale.hysteresis, scale.ceiling) == (2.0**16, 1000, 2, None)


@pytest.mark.parametrize("spelling", ["hysteresis", "hysterisis"])
def test_both_spellings_of_the_naive_modes_options(spelling: str) -> None:
    documented = {
        "log_num_zeros_in_grad": True, "initial_scale": 2**32, "growth_factor": 2, "backoff_factor": 0.5,
        spelling: 3, "max_scale": 2**32, "verbose": True,
    }  # fmt: skip
    code = {"min_scale": 2, "growth_interval": 5, "clip_grad_norm": 0.5}
    recipe = recipe_of(AMP_TYPE.NAIVE, {**documented, **code})
    want = LossScale(init=2.0**32, interval=5, hysteresis=3, floor=2.0, ceiling=2.0**32)
    assert recipe.plan.loss_scale == want
    assert recipe.counts_zeros
    assert recipe.verbose
    assert recipe.clip_grad_norm == 0.5
    assert plan(AMP_TYPE.NAIVE, dynamic_grad_scale=False).loss_scale.dynamic is False


LEVELS = {"O0": PRESETS["O0"], "O2": PRESETS["O2"], "O3": PRESETS["O3"]}


@pytest.mark.parametrize("level", LEVELS)
def test_apex_levels_are_the_presets_and_cast_buffers_too(level: str) -> None:
    regions = {"O0": (), "O2": LOW_BUT_NORMS, "O3": ALL_LOW}[level]
    assert plan(AMP_TYPE.APEX, opt_level=level) == dataclasses.replace(LEVELS[level], regions=regions)


def test_apex_overrides() -> None:
    o1 = plan(AMP_TYPE.APEX)
    assert (o1.rules, o1.params, o1.output) == ("apex", "fp32", "as_is")
    assert o1.loss_scale == LossScale(ceiling=2.0**24)
    assert recipe_of(AMP_TYPE.APEX).covers_loss
    assert plan(AMP_TYPE.APEX, cast_model_type=torch.bfloat16).compute == "bf16"
    assert plan(AMP_TYPE.APEX, opt_level="O2", keep_batchnorm_fp32="False").regions == ALL_LOW
    assert plan(AMP_TYPE.APEX, opt_level="O3", keep_batchnorm_fp32=True).regions == LOW_BUT_NORMS
    assert plan(AMP_TYPE.APEX, opt_level="O2", master_weights=False).master == "none"
    assert plan(AMP_TYPE.APEX, opt_level="O2", loss_scale="128.0").loss_scale == LossScale(
        init=128.0, floor=None, dynamic=False
    )
    assert plan(AMP_TYPE.APEX, opt_level="O2", loss_scale=1.0).loss_scale is None
    assert plan(AMP_TYPE.APEX, opt_level="O3", loss_scale="dynamic").loss_scale == LossScale(ceiling=2.0**24)
    bounded = plan(AMP_TYPE.APEX, min_loss_scale=4, max_loss_scale=1024, num_losses=3, verbosity=0)
    assert bounded.loss_scale == LossScale(init=1024.0, floor=4.0, ceiling=1024.0)
    off = plan(AMP_TYPE.APEX, enabled=False, opt_level="O2")
    assert off == Plan(compute="fp32", output="as_is")


def test_bf16_takes_the_place_of_fp16_only_when_asked() -> None:
    for mode in (AMP_TYPE.TORCH, AMP_TYPE.NAIVE):
        assert plan(mode).compute == "fp16"
        assert plan(mode, dtype=torch.bfloat16).compute == "bf16"
        assert plan(mode, dtype="bf16").loss_scale == plan(mode).loss_scale


@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        ("amp", {}, r"fp16 = dict\(mode='amp'\): not an AMP mode. Allowed: AMP_TYPE.TORCH, AMP_TYPE.APEX"),
        ("naive", {"hysteresis": 2, "hysterisis": 3}, "two spellings of one option with different values"),
        ("naive", {"max_scale": 2.0}, r"LossScale\(ceiling=2.0\) is not allowed"),
        ("torch", {"dtype": "fp32"}, "dtype='fp32' is not allowed. Allowed: fp16, bf16"),
        ("apex", {"opt_level": "02"}, "with the letter O and not the digit zero"),
        ("apex", {"keep_batchnorm_fp32": True}, "which keeps the model's weights in fp32"),
        ("apex", {"master_weights": False}, "which keeps the model's weights in fp32"),
        ("apex", {"opt_level": "O2", "patch_torch_functions": True}, "out, or use opt_level='O2'"),
        ("apex", {"cast_model_type": torch.float16}, "or the model is cast"),
        ("apex", {"opt_level": "O2", "cast_model_outputs": torch.bfloat16}, "Allowed: None, fp32, fp16"),
    ],
)
def test_what_cannot_be(mode: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        recipe_of(mode, options)


def test_an_unknown_option_is_named_with_its_likely_meaning() -> None:
    with pytest.raises(UnknownNameError, match=r"no option 'init_scal' \(did you mean 'init_scale'"):
        recipe_of(AMP_TYPE.TORCH, {"init_scal": 2})


def test_zero_by_itself_is_fp16_with_masters() -> None:
    recipe = zero_recipe({"optimizer_config": {"initial_scale": 2**5, "gpu_margin_mem_ratio": 0.8}})
    assert recipe.plan.stores_low
    assert recipe.plan.loss_scale.init == 32.0
