"""``castwise inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_workloads import mlp, replace
from typer.testing import CliRunner

from castwise.commands.cli import app
from castwise.commands.jobs.inspect import inspect
from castwise.errors import PlanError, WorkloadError

TINY = str(Path(__file__).with_name("tiny_workloads.py"))


def test_each_tool_writes_its_record_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["inspect", f"{TINY}:mlp", "--only", "operators, nonfinite", "--plan", "fp16-mixed"]
    )
    assert done.exit_code == 0, done.stderr
    folder = Path("runs/inspect-mlp")
    for name in ("nonfinite", "operators"):
        record = json.loads((folder / f"{name}.json").read_text())
        assert (record["kind"], record["plan"]) == (name, "fp16-mixed")
        assert (folder / f"{name}.html").exists()
    assert f"Wrote {folder / 'nonfinite'}.html and 3 other files beside it" in done.stdout
    assert done.stdout.index("Everything is finite") < done.stdout.index("fp16-mixed: ")
    assert "Operators" not in done.stdout  # tables are shown with --verbose only


def test_tells_of_a_workload_that_is_not_finite() -> None:
    bad = replace(mlp, loss=lambda model, batch: (mlp.loss(model, batch) * 0).log())
    before = torch.get_rng_state()
    result = inspect(bad, only=["nonfinite"], plan="fp32")
    assert torch.equal(torch.get_rng_state(), before)
    record = result.to_dict()["results"]["nonfinite"]
    assert (record["operator"], record["in_model"], record["cause"]) == ("log", False, "log of zero")


@pytest.mark.parametrize(("plan", "assumed"), [("fp16-true", "fp16-true"), ("fp32", "bf16-mixed")])
def test_a_forecast_is_of_the_plan_where_that_computes_low(plan: str, assumed: str) -> None:
    record = inspect(mlp, only=["forecast"], plan=plan, formats=["fp16"]).to_dict()["results"]["forecast"]
    assert record["plan"] == assumed
    assert record["plan_answer"].startswith(plan if plan == assumed else "")


def test_refuses_tools_that_do_not_exist() -> None:
    with pytest.raises(PlanError, match=r"only='operator'.*did you mean 'operators'"):
        inspect(mlp, only=["operator"])
    with pytest.raises(PlanError, match="no tool is named"):
        inspect(mlp, only=[])


def test_one_tool_that_fails_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="failed"):
        inspect(replace(mlp, loss=lambda model, batch: model(batch)["none"]), only=["operators"])
