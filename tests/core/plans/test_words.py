"""A plan described in words: the preset and the differences from it."""

from __future__ import annotations

import dataclasses

import pytest

from castwise.core.plans.plan import PRESETS, Plan, Region
from castwise.core.plans.words import in_words


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_name(name: str) -> None:
    assert in_words(PRESETS[name]) == in_words(name) == str(PRESETS[name])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bf16-mixed+regions.head=fp32", "bf16-mixed; head in fp32"),
        ("bf16-mixed+regions.0=fp32+regions.2=fp32", "bf16-mixed; module 0 and module 2 in fp32"),
        ("bf16-mixed+regions.type:Conv*=fp16", "bf16-mixed; Conv* in fp16"),
        ("bf16-true+regions.type:BatchNorm*=params:fp32", "bf16-true; BatchNorm* stored in fp32"),
        ("bf16-mixed+ops.exp=fp32+ops.log=fp32", "bf16-mixed; exp and log in fp32"),
        ("bf16-mixed+ops.softmax=as_is", "bf16-mixed; softmax not cast"),
        (
            "bf16-master+ops.scaled_dot_product_attention=unfused",
            "bf16-master; scaled_dot_product_attention unfused",
        ),
        ("fp32+fp32_matmul=bf16", "fp32; fp32 products in bf16"),
        ("fp32+fp32_matmul=tf32+fp32_conv=tf32", "tf32"),
        (
            "bf16-mixed+memory_format=channels_last+optimizer=fused+compile=default+host_memory=keep",
            "bf16-mixed; channels_last; fused optimizer; compiled; freed memory kept",
        ),
        ("fp16-mixed+loss_scale.init=1024", "fp16-mixed; loss scale from 1024"),
        ("bf16-mixed+output=as_is", "bf16-mixed; output as_is"),
        ("not a plan", "not a plan"),
    ],
)
def test_what_differs_from_a_preset_is_said(line: str, said: str) -> None:
    assert in_words(line) == said


def test_many_regions_are_counted() -> None:
    plan = dataclasses.replace(
        PRESETS["bf16-mixed"], regions=[Region(f"blocks.{i}", compute="fp32") for i in range(5)]
    )
    assert in_words(plan) == "bf16-mixed; 5 regions (blocks.0, blocks.1, ...) in fp32"


def test_no_field_of_a_plan_goes_unsaid() -> None:
    """A plan that differs from bf16-mixed in one field has a different description."""
    base = PRESETS["bf16-mixed"]
    others = {
        "compute": "fp16", "params": "compute", "regions": {"a": "fp32"}, "rules": "cuda", "ops": {"exp": "fp32"},
        "fp32_matmul": "ieee", "fp32_conv": "tf32", "memory_format": "channels_last", "optimizer": "fused",
        "compile": "default", "host_memory": "keep", "output": "as_is", "loss_scale": {"init": 2.0},
    }  # fmt: skip
    fields = {f.name for f in dataclasses.fields(Plan) if f.compare}
    assert fields - others.keys() == {"master"}  # ``master`` has no meaning for parameters stored in fp32
    said = [in_words(dataclasses.replace(base, **{name: value})) for name, value in others.items()]
    assert len({*said, in_words(base)}) == len(others) + 1
    low = dataclasses.replace(base, params="compute")
    assert in_words(low) != in_words(dataclasses.replace(low, master="none"))
