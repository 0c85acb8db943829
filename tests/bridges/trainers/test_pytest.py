"""``assert_precision_safe``, as a function and, in a separate pytest run, as a fixture."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

import castwise
from castwise.bridges.trainers.pytest import PrecisionUndecided, PrecisionUnsafe, assert_precision_safe

ROOT = Path(__file__).parents[3]


class Standardise(nn.Module):
    """A norm with the variance E[x^2] - E[x]^2, around a mean so large that low formats lose the digits."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.offset
        mean = y.mean(-1, keepdim=True)
        return (y - mean) / ((y * y).mean(-1, keepdim=True) - mean * mean).clamp_min(0).add(1e-3).sqrt()


class Innocent(nn.Module):
    """The identity."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Counter(nn.Module):
    """A counter in the format of its input; in bf16 it stops, because 301 is not representable."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.full((), 300.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = (self.calls.to(x.dtype) + 1).float()
        return x


class Noisy(nn.Module):
    """Noise that differs per call and ignores seeds, but restarts with each new instance."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        Noisy.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Noisy.calls += 1
        return x * (1.0 + 0.5 * math.sin(Noisy.calls**2))


def model(*places: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *places, nn.Linear(32, 4))


def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(m(batch[0]), batch[1])


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, 16, generator=draw), torch.randint(4, (16,), generator=draw)) for _ in range(count)
    ]


BATCHES = batches(40)


def test_a_sound_plan_passes_and_leaves_the_model_as_it_was() -> None:
    tested = model(nn.GELU(), nn.Dropout(0.1)).eval()
    before = {key: value.clone() for key, value in tested.state_dict().items()}
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1), random.random()
    torch.manual_seed(5)
    random.seed(5)
    result = assert_precision_safe(tested, loss, BATCHES, "bf16-mixed", optimizer=torch.optim.AdamW)
    assert (torch.rand(1), random.random()) == expected
    assert result.passed
    assert result.severity < 1.0
    assert not tested.training
    for key, value in tested.state_dict().items():
        assert torch.equal(value, before[key])
    for module in tested.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(p.grad is None and p.dtype is torch.float32 for p in tested.parameters())


def test_a_failure_says_what_is_wrong_by_how_much_and_what_to_try() -> None:
    with pytest.raises(PrecisionUnsafe) as caught:
        assert_precision_safe(model(nn.GELU(), Standardise(100.0)), loss, BATCHES, "bf16-mixed")
    said = str(caught.value)
    assert caught.value.result.verdict == "fail"
    assert f"{caught.value.result.damage.value:.2g}" in said
    assert "To pass, damage must stay below 0.01." in said
    assert "With 2 (Standardise) in fp32 the plan passes: damage is " in said
    assert "Try: adding Region('2', compute='fp32') to the plan's regions" in said
    cured = castwise.Plan.parse("bf16-mixed+regions.2=fp32")
    assert assert_precision_safe(model(nn.GELU(), Standardise(100.0)), loss, BATCHES, cured)


def test_a_kind_of_module_that_is_wrong_in_many_places_is_named_by_type() -> None:
    with pytest.raises(
        PrecisionUnsafe, match=r"With Standardise \(2 of them, such as 1\) in fp32 the plan passes"
    ) as caught:
        assert_precision_safe(
            model(Standardise(100.0), nn.Linear(32, 32), Standardise(100.0)), loss, BATCHES, "bf16-mixed"
        )
    assert "Region('type:Standardise', compute='fp32')" in str(caught.value)


def test_a_search_that_finds_no_cure_blames_nobody() -> None:
    with pytest.raises(
        PrecisionUnsafe,
        match=r"No single kind of module makes the plan pass in fp32 \(1 tried\)\.\s*Try",
    ):
        assert_precision_safe(
            model(Innocent(), nn.Linear(32, 32), Standardise(100.0)), loss, BATCHES, "bf16-mixed", max_tried=1
        )


@pytest.mark.parametrize(
    ("plan", "advice"),
    [("bf16-true", "Try: fp32 masters"), ("bf16-master", "Try: keeping the state of 2 in fp32")],
    ids=["updates", "state"],
)
def test_what_is_wrong_beside_gradients(plan: str, advice: str) -> None:
    places = [nn.GELU(), Counter()] if plan == "bf16-master" else [nn.GELU()]
    with pytest.raises(PrecisionUnsafe, match=advice):
        assert_precision_safe(
            model(*places), loss, BATCHES, plan, optimizer=lambda params: torch.optim.SGD(params, lr=1e-6)
        )


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (lambda: Standardise(3.0), r"about\s+\d+\s+would\s+decide"),
        (Noisy, "computed twice from the same inputs"),
    ],
    ids=["too few batches", "noise"],
)
def test_what_cannot_be_told_is_no_failure_of_the_plan(place: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(PrecisionUndecided, match=said) as caught:
        assert_precision_safe(model(place()), loss, BATCHES, "bf16-mixed")
    assert not isinstance(caught.value, PrecisionUnsafe)
    with pytest.raises(pytest.skip.Exception, match=said):
        assert_precision_safe(model(place()), loss, BATCHES, "bf16-mixed", undecided="skip")


def test_one_finding_whatever_was_drawn_before() -> None:
    """With a shuffling DataLoader and dropout the result depends only on ``seed``."""
    tested = model(nn.GELU(), nn.Dropout(0.5))
    loader = torch.utils.data.DataLoader([(x[0], y[0]) for x, y in batches(64)], batch_size=8, shuffle=True)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        random.seed(seed)
        found.append(assert_precision_safe(tested, loss, loader, "bf16-mixed", microbatches=29))
    assert found[0] == found[1]
    assert assert_precision_safe(tested, loss, loader, "bf16-mixed", microbatches=29, seed=1) != found[0]


def test_what_is_neither_fail_nor_skip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"undecided='ignore'; give 'fail' or 'skip'"):
        assert_precision_safe(model(), loss, BATCHES, "bf16-mixed", undecided="ignore")  # type: ignore[arg-type]


def test_the_job_for_ci_runs_the_example() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    jobs = [
        yaml.safe_load(block)
        for block in re.findall(r"^```text\n(name: .*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    (job,) = jobs[0]["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs[0].endswith("castwise pytest")
    assert runs[1].split("/")[-1] == "test_plan.py"
    assert (ROOT / "examples" / "test_plan.py").exists()


# --- as a plug-in ---------------------------------------------------------------------------------------------


def pytest_of_its_own(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with castwise installed through the entry points of pyproject.toml."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "entry-points"
    ]
    installed = folder / "site" / "castwise-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: castwise\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in entry_points["pytest11"].items()]
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines]))
    path = os.pathsep.join([str(installed.parent), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-W", "error", "-q", *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_it_costs_nothing_where_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("""
import sys

def test_nothing():
    assert "torch" not in sys.modules
    loaded = {name for name in sys.modules if name.startswith("castwise")}
    assert loaded == {"castwise", *("castwise.bridges", "castwise.bridges.trainers", "castwise.bridges.trainers.pytest")}
""")
    done = pytest_of_its_own(tmp_path, "-p", "no:xdist")
    assert done.returncode == 0, done.stdout
    assert "precision plans" not in done.stdout


def test_the_example_and_every_outcome_under_xdist(tmp_path: Path) -> None:
    shutil.copy(__file__, tmp_path / "parts.py")
    (tmp_path / "test_mine.py").write_text("""
import torch
from parts import BATCHES, Noisy, Standardise, loss
from torch import nn

def model(*places):  # seeded by the fixture
    return nn.Sequential(nn.Linear(16, 32), *places, nn.Linear(32, 4))

def test_sound(assert_precision_safe):
    drawn = torch.rand(1)
    assert assert_precision_safe(model(nn.GELU()), loss, BATCHES, "bf16-mixed").passed
    torch.manual_seed(0)
    assert drawn == torch.rand(1)

def test_unsafe(assert_precision_safe):
    assert_precision_safe(model(Standardise(100.0)), loss, BATCHES, "bf16-mixed")

def test_undecided(assert_precision_safe):
    assert_precision_safe(model(Noisy()), loss, BATCHES, "bf16-mixed")

def test_skipped(assert_precision_safe):
    assert_precision_safe(model(Noisy()), loss, BATCHES, "bf16-mixed", undecided="skip")
""")
    example = ROOT / "examples" / "test_plan.py"
    words = ("-n", "1", "-p", "no:cacheprovider", "--junitxml", "found.xml")
    done = pytest_of_its_own(tmp_path, *words, "test_mine.py", str(example))
    assert "2 failed, 2 passed, 1 skipped" in done.stdout, done.stdout
    assert "PrecisionUnsafe: bf16-mixed: fail." in done.stdout
    assert "PrecisionUndecided: bf16-mixed: undecided." in done.stdout, done.stdout
    assert "__tracebackhide__" not in done.stdout  # the traceback ends at the user's assertion
    found = dict(
        re.findall(r"^\S*::(test_\w+): (\w+) at \S+ times the limit: bf16-mixed$", done.stdout, re.MULTILINE)
    )
    assert found == {
        "test_sound": "pass",
        "test_unsafe": "fail",
        "test_undecided": "undecided",
        "test_skipped": "undecided",
        "test_the_plan_fits_the_model": "pass",
    }
    assert (tmp_path / "found.xml").read_text().count('<property name="castwise" value="') == 5
