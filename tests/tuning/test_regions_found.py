"""Parts: the regions that a search decides about, and the plans made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise import Plan
from castwise.tuning.parts import Part, exempt, find_parts, only, operators_used


class Gate(nn.Module):
    """Computes something itself, beside its children."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x).sigmoid()


class Block(nn.Module):
    """Only adds what its children make."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate = Gate()
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(self.norm(x))


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


def parts_of(model: nn.Module) -> tuple[Part, ...]:
    return find_parts(model, lambda: model(torch.randn(4, 8)))


def formats_seen(model: nn.Module, plan: Plan) -> dict[str, torch.dtype]:
    """Dtype of what each module returns inside a prepared model."""
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():

        def note(_module: nn.Module, _args: Any, out: Tensor, name: str = name) -> None:
            seen[name] = out.dtype

        module.register_forward_hook(note)
    with castwise.Amp(plan, device="cpu") as amp:
        amp.prepare(model)(torch.randn(4, 8))
    return seen


@pytest.mark.parametrize("depth", [2, 48])
def test_repeated_blocks_are_one_part_whatever_the_depth(depth: int) -> None:
    parts = parts_of(Model(depth))
    assert [u.pattern for u in parts] == [
        "blocks.*.norm", "blocks.*.gate", "blocks.*.gate.left", "blocks.*.gate.right", "tail.0", "tail.1", "tail.2",
    ]  # fmt: skip
    assert parts[0].paths == tuple(f"blocks.{i}.norm" for i in range(depth))
    assert parts[1].inner == ("blocks.*.gate.left", "blocks.*.gate.right")
    assert parts[1].parameters == 0
    assert parts[2].parameters == depth * 72


def test_blocks_that_differ_are_units_of_their_own() -> None:
    model = Model()
    model.blocks[1].norm = nn.LayerNorm(8, eps=1e-3)
    assert {"blocks.0.norm", "blocks.1.norm", "blocks.2.norm"} <= {u.pattern for u in parts_of(model)}


def test_the_model_itself_can_be_a_unit() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).exp()

    parts = parts_of(Own())
    assert [u.pattern for u in parts] == ["type:Own", "layer"]
    plan = exempt(Plan.preset("bf16-mixed"), parts, ["type:Own"])
    assert formats_seen(Own(), plan)["layer"] is torch.bfloat16


def test_what_is_kept_runs_wide_and_nothing_else_does() -> None:
    parts = parts_of(Model())
    seen = formats_seen(Model(), exempt(Plan.preset("bf16-mixed"), parts, ["tail.0"]))
    assert seen["blocks.0.gate.left"] is torch.bfloat16
    seen = formats_seen(Model(), exempt(Plan.preset("bf16-mixed"), parts, ["blocks.*.gate"]))
    assert seen["blocks.2.gate.left"] is torch.bfloat16  # given back: what the gate computes itself is kept
    only_left = only(Plan.preset("bf16-mixed"), parts, ["blocks.*.gate.left"])
    seen = formats_seen(Model(), only_left)
    assert only_left.compute == "fp32"
    assert seen["blocks.1.gate.right"] is torch.float32


def test_units_decided_alike_are_written_as_one_region() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 9 + i), nn.Linear(9 + i, 8)) for i in range(2)))
    parts = parts_of(model)
    assert [u.pattern for u in parts] == ["0.0", "0.1", "1.0", "1.1"]
    assert [
        r.pattern for r in exempt(Plan.preset("bf16-mixed"), parts, [u.pattern for u in parts]).regions
    ] == ["*.*"]
    assert [r.pattern for r in exempt(Plan.preset("bf16-mixed"), parts, ["0.0", "1.1"]).regions] == [
        "0.0",
        "1.1",
    ]


def test_operators_are_seen_by_what_they_are_made_of() -> None:
    model = Model()
    used = operators_used(lambda: model(torch.randn(4, 8)).softmax(-1))
    assert {"native_layer_norm", "_softmax", "addmm", "relu"} <= used
