"""What searches found before: offered for the same job, never for another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.evidence import make_evidence
from tests.tuning.test_choices import CPU
from torch import Tensor, nn

import castwise
from castwise import Plan, Workload
from castwise.jobs import tune as jobs_tune
from castwise.tuning import index
from castwise.tuning.fastest import with_plans_from_elsewhere
from castwise.tuning.index import find, job_of, keep, restored
from castwise.tuning.state import AUTOCAST, FP32, SearchState, Settings

SETTINGS = Settings(goal="numerics", formats=("bf16",))
WIDE = 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CASTWISE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(16, WIDE, generator=generator), torch.randn(16, 2, generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


JOB = Workload(
    "job",
    model=lambda: nn.Sequential(nn.Linear(WIDE, 16), nn.Tanh(), nn.Linear(16, 2)),
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    batches=batches,
    loss=loss,
)


def tuned(workload: Workload = JOB, **options: Any) -> castwise.TuneResult:
    return castwise.tune(workload, goal="numerics", formats=("bf16",), device="cpu", memory=False, **options)


def test_the_same_job_is_answered_at_once_with_all_that_was_measured() -> None:
    first, again = tuned(), tuned()
    assert again.plan == first.plan
    assert again.plan.provenance == first.plan.provenance
    note, *notes = again.evidence.notes
    assert note.startswith(f"Found on {first.evidence.environment.date[:10]}")
    assert "--fresh" in note
    assert dataclasses.replace(again.evidence, notes=tuple(notes)) == first.evidence
    assert tuned(fresh=True).evidence.notes == first.evidence.notes


def test_what_was_found_before_can_be_saved_and_shown(tmp_path: Path) -> None:
    tuned()
    again = tuned()
    page, *_ = again.save(tmp_path / "again")
    assert "nothing was measured again" in page.read_text()
    assert again.table() is not None


OTHERS: dict[str, dict[str, Any]] = {
    "another model": {"model": lambda: nn.Sequential(nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, 2))},
    "another optimizer": {"optimizer": lambda params: torch.optim.SGD(params, lr=1e-3)},
    "another rate": {"optimizer": lambda params: torch.optim.Adam(params, lr=1e-2)},
    "another loss": {"loss": lambda model, batch: loss(model, batch) * 2.0},
    "other data": {"batches": lambda seed: ((x * 3.0, y) for x, y in batches(seed))},
    "other shapes": {"batches": lambda seed: ((x[:8], y[:8]) for x, y in batches(seed))},
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_job_is_searched(what: str) -> None:
    known = job_of(JOB, CPU, SETTINGS)
    other = job_of(dataclasses.replace(JOB, **OTHERS[what]), CPU, SETTINGS)
    assert known is not None
    assert other is not None
    assert other.digest != known.digest or not other.is_like(dataclasses.asdict(known))
    keep(known, CPU, Plan.preset("bf16-mixed"), {})
    assert find(other, CPU) == (None, [])


def test_what_was_asked_tells_jobs_apart_but_not_for_how_long() -> None:
    known = job_of(JOB, CPU, SETTINGS)
    assert known == job_of(JOB, CPU, dataclasses.replace(SETTINGS, budget_s=30.0, memory=False))
    for change in ({"accumulate": 2}, {"goal": "time"}, {"formats": ("fp16",)}, {"warmup_steps": 1}):
        other = job_of(JOB, CPU, dataclasses.replace(SETTINGS, **change))
        assert other is not None
        assert known is not None
        assert other.digest != known.digest, change


def test_a_plan_from_another_device_is_a_candidate_and_no_answer(cache: Path) -> None:
    job = job_of(JOB, CPU, Settings(formats=("fp32", "bf16")))
    assert job is not None
    plan = dataclasses.replace(Plan.parse("bf16-mixed+regions.2=fp32"), provenance={"device": "another"})
    keep(job, CPU, plan, {})
    (path,) = cache.glob("*.json")
    entry = json.loads(path.read_text())
    entry["place"]["device"] = "another"
    path.write_text(json.dumps(entry))
    plan = dataclasses.replace(plan, provenance=None)
    assert find(job, CPU) == (None, [plan])
    search = SearchState(
        JOB, CPU, Settings(formats=("fp32", "bf16")), elsewhere=[plan, Plan.preset("fp16-mixed")]
    )
    assert with_plans_from_elsewhere(search, [FP32, AUTOCAST]) == [plan, FP32, AUTOCAST]


@pytest.mark.parametrize("harm", ["", "{", "[]", '{"job": 1}', None])
def test_a_file_that_cannot_be_read_is_as_if_it_were_not_there(cache: Path, harm: str | None) -> None:
    job = job_of(JOB, CPU, SETTINGS)
    assert job is not None
    keep(job, CPU, Plan.preset("bf16-mixed"), make_evidence_record())
    (path,) = cache.glob("*.json")
    assert find(job, CPU)[0] is not None
    entry = json.loads(path.read_text())
    del entry["evidence"]["environment"]
    path.write_text(json.dumps(entry) if harm is None else harm)
    assert find(job, CPU) == (None, [])


def make_evidence_record() -> dict[str, Any]:
    return castwise.TuneResult(Plan.preset("bf16-mixed"), make_evidence()).to_dict()


def test_a_record_comes_back_as_it_was_but_for_numbers_that_json_has_not() -> None:
    record = make_evidence()
    assert castwise.TuneResult(Plan.preset("fp32"), restored(type(record), make_evidence_record())).to_dict() == (
        castwise.TuneResult(Plan.preset("fp32"), record).to_dict()
    )  # fmt: skip


def test_a_search_without_an_end_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(jobs_tune.Search):
        def run(self) -> None:
            super().run()
            self.complete = False

    monkeypatch.setattr(jobs_tune, "Search", Endless)
    tuned()
    assert not list(cache.glob("*"))


def test_an_empty_variable_turns_it_off_and_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    job = job_of(JOB, CPU, SETTINGS)
    assert job is not None
    monkeypatch.setenv("CASTWISE_CACHE_DIR", str(tmp_path / "file"))
    keep(job, CPU, AUTOCAST, {})
    assert find(job, CPU) == (None, [])
    monkeypatch.setenv("CASTWISE_CACHE_DIR", "")
    assert index.folder() is None
    keep(job, CPU, AUTOCAST, {})
    assert find(job, CPU) == (None, [])


def test_a_job_that_fails_is_left_to_its_search() -> None:
    def broken(_model: nn.Module, _batch: Any) -> Tensor:
        raise KeyError("planted")

    assert job_of(dataclasses.replace(JOB, loss=broken), CPU, SETTINGS) is None
