"""``compare`` names the operators whose integer or boolean results change with the format."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise.lab.inspect.comparison import worst_of

COUNTED = (torch.ones(400).bfloat16().cumsum(0) - 1).long()
WRONG = int((torch.arange(400) != COUNTED).sum())
"""The number of positions that bf16 rounds to others."""


class Positions(nn.Module):
    """Position embeddings, with the positions counted in a given dtype."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype
        self.table = nn.Embedding(512, 16)

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(x.shape[1], dtype=self.dtype or x.dtype, device=x.device)
        return x + self.table((ones.cumsum(0, dtype=ones.dtype) - 1).long())


def _compared(dtype: torch.dtype | None, plan: str = "bf16-mixed", length: int = 400) -> castwise.Comparison:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Positions(dtype), nn.ReLU(), nn.Linear(16, 16))
    batch = torch.randn(2, length, 16), torch.randint(16, (2, length))
    return castwise.compare(
        model,
        lambda m, b: functional.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()),
        batch,
        "fp32",
        plan,
    )


@pytest.fixture(scope="module")
def found() -> castwise.Comparison:
    return _compared(None)


def test_a_wrong_index_is_named_with_its_module_operator_and_rate(found: castwise.Comparison) -> None:
    (choice,) = found.choices
    assert (choice.path, choice.operator, choice.elements) == ("1", "_to_copy", 400)
    assert choice.is_wrong
    assert choice.changed == choice.wrong == WRONG


def test_terminal_page_and_json_show_it(found: castwise.Comparison, tmp_path: Path) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(found.table())
    said = " ".join(console.export_text().split())
    assert "integers or masks differ by more than rounding explains: conversion to integers in 1." in said
    assert f"{WRONG / 400:.2%}" in said
    page = found.save(tmp_path).read_text()
    assert "Choices that differ" in page
    (row,) = json.loads((tmp_path / "compare.json").read_text())["choices"]
    assert row["path"] == "1"
    assert row["is_wrong"] is True
    assert row["share"] == WRONG / 400


@pytest.mark.parametrize(("dtype", "plan", "length"), [(torch.float32, "bf16-mixed", 400), (None, "fp16-mixed", 400), (None, "bf16-mixed", 250)])  # fmt: skip
def test_positions_that_the_format_holds_are_not_named(dtype: torch.dtype, plan: str, length: int) -> None:
    assert not _compared(dtype, plan, length).choices


class Counted(nn.Module):
    """Rows scaled by uint8 factors or masked beyond a length read with ``int()``, counted in the input's dtype."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones_like(x[0, :, 0])
        if self.reads:
            length = int(ones.cumsum(0, dtype=ones.dtype)[-1])
            return x * (torch.arange(x.shape[1]) < length)[:, None]
        return x * ((ones.cumsum(0, dtype=ones.dtype) - 300).relu().to(torch.uint8) / 255)[:, None]


@pytest.mark.parametrize(("reads", "operator"), [(False, "conversion to integers"), (True, "item")])
def test_bytes_and_numbers_that_python_reads_are_choices(reads: bool, operator: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Counted(reads), nn.Linear(16, 16))
    batch = torch.randn(2, 401, 16), torch.randint(16, (2, 401))

    def loss(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())

    (choice,) = castwise.compare(model, loss, batch, "fp32", "bf16-mixed").choices
    assert (choice.path, choice.what) == ("1", operator)
    assert choice.wrong > 0
    assert not castwise.compare(model, loss, batch, "fp32", "fp16-mixed").choices


class Times(nn.Module):
    """A linear layer on the sine and cosine of a time; the input is one number per example."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 4)

    def forward(self, t: Tensor) -> Tensor:
        angle = t[:, None] / 50
        out: Tensor = self.linear(torch.cat([angle.sin(), angle.cos()], 1))
        return out


@pytest.mark.filterwarnings("ignore:The plan rounds floating inputs")
def test_inputs_that_become_equal_are_in_the_answer() -> None:
    def compared(plan: str, times: Tensor) -> castwise.Comparison:
        torch.manual_seed(0)
        return castwise.compare(Times(), lambda m, b: m(b).square().mean(), times, "fp32", plan)

    times = torch.arange(600.0, 664.0)
    found = compared("bf16-true", times)
    assert "makes distinct values of an input of shape [64] equal: 600 and 601 become 600" in found.collapsed
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(found.table())
    assert found.collapsed in console.export_text()
    for sound in (compared("bf16-mixed", times), compared("bf16-true", times - 600)):
        assert not sound.collapsed


def test_a_model_without_choices_takes_no_pass_more(found: castwise.Comparison) -> None:
    torch.manual_seed(0)
    plain = castwise.compare(
        nn.Linear(4, 4), lambda m, b: m(b).square().mean(), torch.randn(8, 4), "fp32", "bf16-mixed", tries=0
    )
    assert plain.passes == 5
    assert plain.choices == ()


def test_of_ranks_the_worst_result_of_each_operator_remains(found: castwise.Comparison) -> None:
    assert worst_of([_compared(torch.float32), found]).choices == found.choices
