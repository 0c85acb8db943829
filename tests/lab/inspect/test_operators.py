"""Counts of operators by format, and of casts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from castwise import OperatorTable, operator_table
from castwise.errors import PlanError
from castwise.report.show import page
from tests.report.pages import read

BATCH, WIDTH = 4, 8


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


def _table(model: nn.Module, plan: str = "bf16-mixed") -> OperatorTable:
    return operator_table(model, _loss, torch.ones(BATCH, WIDTH), plan, repeats=1)


def _calls(table: OperatorTable, operator: str, phase: str = "forward") -> dict[str, int]:
    return {
        use.format: use.calls for use in table.operators if use.operator == operator and use.phase == phase
    }


def test_counts_operators_by_format_and_phase() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1), nn.Linear(WIDTH, WIDTH))
    low, wide = _table(model), _table(model, "fp32")
    assert _calls(low, "addmm") == {"bf16": 2}
    assert _calls(wide, "addmm") == {"fp32": 2}
    assert _calls(low, "mm", "backward") == {"bf16": 3}  # the first layer's input needs no gradient
    assert _calls(wide, "mm", "backward") == {"fp32": 3}
    assert wide.casts == ()
    assert wide.cast_bytes == 0


def test_counts_casts_and_the_bytes_that_they_move() -> None:
    table = _table(nn.Linear(WIDTH, WIDTH, bias=False))
    into = [
        cast for cast in table.casts if (cast.before, cast.after, cast.phase) == ("fp32", "bf16", "forward")
    ]
    assert sum(cast.calls for cast in into) == 2  # the casts of weight and input
    assert sum(cast.bytes for cast in into) == (WIDTH * WIDTH + BATCH * WIDTH) * (4 + 2)
    assert table.avoidable == ()


class Three(nn.Module):
    """One fp32 tensor that goes into three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.q(y) * self.k(y) + self.v(y)


def test_a_tensor_that_is_cast_again_and_again_is_told() -> None:
    repeated = [cast for cast in _table(Three()).avoidable if cast.phase == "forward"]
    assert {(cast.module, cast.first, cast.calls) for cast in repeated} == {("k", "q", 1), ("v", "q", 1)}
    assert {cast.avoidable for cast in repeated} == {"repeated"}
    assert {cast.bytes for cast in repeated} == {BATCH * WIDTH * 6}


def test_a_tensor_that_was_written_to_in_between_is_cast_anew() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            first = y.to(torch.bfloat16)
            y.add_(1.0)
            return first.float() * 0 + y.to(torch.bfloat16).float() * self.weight

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

    kinds = [cast.avoidable for cast in _table(Writes(), "fp32").casts if cast.phase == "forward"]
    assert "repeated" not in kinds


def test_a_cast_that_takes_another_back_is_told() -> None:
    class There(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            there = (x * self.weight).to(torch.bfloat16)
            return there.view(-1, WIDTH).to(torch.float32)

    (cast,) = [cast for cast in _table(There(), "fp32").avoidable if cast.phase == "forward"]
    assert (cast.avoidable, cast.before, cast.after, cast.calls) == ("round trip", "bf16", "fp32", 1)
    assert cast.source.startswith("test_operators.py, line ")


def test_regions_hold_what_runs_in_themselves() -> None:
    table = _table(Three())
    regions = {use.path: use for use in table.regions}
    assert regions["k"].avoidable_bytes == BATCH * WIDTH * 6 * (1 + 0)
    assert sum(use.calls for use in table.regions) == sum(use.calls for use in table.operators)
    assert sum(use.casts for use in table.regions) == sum(cast.calls for cast in table.casts)


def test_saves_a_record_and_a_page_that_say_the_same(tmp_path: Path) -> None:
    table = _table(Three())
    path = table.save(tmp_path)
    record = json.loads((tmp_path / "operators.json").read_text())
    text = path.read_text()
    assert record["answer"] in read(re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL))
    assert page(record) == text
    assert record["cast_bytes"] == table.cast_bytes
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_refuses_no_repeats() -> None:
    with pytest.raises(PlanError, match=r"operator_table\(repeats=0\)"):
        operator_table(nn.Linear(2, 2), _loss, torch.ones(2, 2), repeats=0)
