"""Parts: the regions that a search decides on, and the plans built from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise import Plan
from castwise.lab.passes.regions import Part, exempt, find_parts, only, operators_used, whole
from tests.here import DEVICE


class Gate(nn.Module):
    """A module that computes something itself, besides calling its children."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x).sigmoid()


class Block(nn.Module):
    """A module that only adds its children's results."""

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
    """Return the output dtype of each module of a prepared model."""
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():

        def note(_module: nn.Module, _args: Any, out: Tensor, name: str = name) -> None:
            seen[name] = out.dtype

        module.register_forward_hook(note)
    with castwise.Amp(plan, device=DEVICE) as amp:
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
    assert seen["blocks.2.gate.left"] is torch.bfloat16  # only the gate's own operators are kept in fp32
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
    ] == ["*"]
    assert [r.pattern for r in exempt(Plan.preset("bf16-mixed"), parts, ["0.0", "0.1"]).regions] == ["0"]
    assert [r.pattern for r in exempt(Plan.preset("bf16-mixed"), parts, ["0.0", "1.1"]).regions] == [
        "0.0",
        "1.1",
    ]


def test_containers_hold_all_or_nothing_of_every_part() -> None:
    parts = {part.pattern: [container.pattern for container in part.around] for part in parts_of(Model())}
    assert parts["blocks.*.norm"] == ["blocks.*"]
    assert parts["blocks.*.gate"] == [
        "blocks.*.gate",
        "blocks.*",
    ]  # the gate with its children is a container
    assert parts["tail.0"] == ["tail"]
    model = Model(2)

    def forward() -> None:
        model.blocks[1].gate(model.blocks[1].norm(model.blocks[0](torch.randn(4, 8))))

    parts = {part.pattern: [c.pattern for c in part.around] for part in find_parts(model, forward)}
    assert parts["blocks.*.norm"] == []  # the one block that is called holds only half of this part
    assert parts["blocks.*.gate.left"] == ["blocks.*.gate"]


def test_a_container_is_one_region_and_what_it_does_itself_stays_in_its_format() -> None:
    parts = parts_of(Model())
    blocks = ["blocks.*.norm", "blocks.*.gate", "blocks.*.gate.left", "blocks.*.gate.right"]
    low = Plan.preset("bf16-mixed")
    assert [r.pattern for r in exempt(low, parts, blocks).regions] == ["blocks.*"]
    assert [r.pattern for r in exempt(low, parts, blocks[1:]).regions] == ["blocks.*.gate"]
    assert [r.pattern for r in exempt(low, parts, ["tail.1", *blocks[2:]]).regions] == [
        "blocks.*.gate.left", "blocks.*.gate.right", "tail.1",
    ]  # fmt: skip
    seen = formats_seen(Model(), only(low, parts, blocks))
    assert (seen["blocks.1.gate.left"], seen["tail.0"]) == (torch.bfloat16, torch.float32)


def test_a_container_of_one_part_is_chosen_by_its_own_name() -> None:
    parts = parts_of(nn.Sequential(nn.Sequential(nn.Identity(), nn.Linear(8, 8)), nn.Linear(8, 2)))
    low = Plan.preset("bf16-mixed")
    assert whole(parts, parts[0].around[0]) == ("0.1", "0")
    assert [r.pattern for r in exempt(low, parts, ["0.1"]).regions] == ["0.1"]
    assert [r.pattern for r in exempt(low, parts, ["0.1", "0"]).regions] == ["0"]


class Sum(nn.Module):
    def __init__(self, by: float | None, *inner: nn.Module) -> None:
        super().__init__()
        self.by = by
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + (x if self.by is None else self.by)


@pytest.mark.parametrize(
    ("module", "is_part"),
    [
        (Sum(3.0, nn.Tanh()), True),
        (Sum(None, nn.Tanh()), False),
        (nn.Identity(), False),
        (nn.Flatten(), False),
    ],
    ids=["a number", "a residual", "identity", "view"],
)
def test_a_sum_with_a_number_is_something_to_decide_about(module: nn.Module, is_part: bool) -> None:
    parts = parts_of(nn.Sequential(nn.Linear(8, 8), module))
    assert ("1" in [part.pattern for part in parts]) is is_part


def test_operators_are_seen_by_what_they_are_made_of() -> None:
    model = Model()
    used = operators_used(lambda: model(torch.randn(4, 8)).softmax(-1))
    assert {"native_layer_norm", "_softmax", "addmm", "relu"} <= used
