"""Self-checks on an untested torch release: they pass on this release, and each detects its fault."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from castwise import Amp
from castwise.core import _torch, masters
from castwise.core.plans import rules
from castwise.core.session import canary
from tests.here import DEVICE


@pytest.fixture(autouse=True)
def unasked() -> Iterator[None]:
    """Reset the check's cache before and after each test, as in a new process."""
    canary.check_torch.cache_clear()
    yield
    canary.check_torch.cache_clear()


def said() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Amp("bf16-mixed", device=DEVICE)
        Amp("bf16-mixed", device=DEVICE)
    return [str(warning.message) for warning in caught]


def test_nothing_is_said_where_the_suite_has_passed() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in canary.TESTED
    assert said() == []


def test_the_table_of_the_docs_has_the_releases_that_were_tested() -> None:
    page = (Path(__file__).parents[3] / "docs" / "install.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| (\d\.\d+) \|", page, re.MULTILINE)) == canary.TESTED


def test_another_release_is_told_once_that_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.1.0+cpu")
    (message,) = said()
    assert (
        f"tested with torch {', '.join(canary.TESTED)}, and this is 9.1.0+cpu. The self-checks passed."
        in message
    )
    assert torch.exp(torch.ones(1, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_operators_that_no_table_lists_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.1.0+cpu")
    described = rules.describe
    newer = (rules.Row("sqrth", "native", ""), rules.Row("another", "native", ""))
    monkeypatch.setattr(rules, "describe", lambda *asked: (*described(*asked), *newer))
    (message,) = said()
    named = re.search(
        "The self-checks passed. Operators that castwise's tables do not list are cast as torch.autocast casts them: ([a-z, ]+). Use a torch "
        "release",
        message,
    )
    assert named
    assert {"another", "sqrth"} <= set(named[1].split(", "))


def nothing(*_: Any, **__: Any) -> Any:
    return lambda: None


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "operator overrides": lambda patch: patch.setattr(_torch.dispatcher, "register_autocast_kernel", nothing),
    "recompiling when the plan changes": lambda patch: patch.setattr(_torch.dynamo, "_spare_devices", dict),
    "following backward": lambda patch: patch.setattr(_torch.autograd, "around_python_backward", nothing),
    "the loss scale": lambda patch: patch.setattr(_torch.grad_scaler, "check_and_unscale", nothing),
    "masters": lambda patch: patch.setattr(masters, "attach", nothing),
    "hooks of modules and optimizers": lambda patch: patch.setattr(_torch.hooks, "remove_hooks", nothing),
}


@pytest.mark.parametrize("name", canary._CHECKS)
def test_each_check_finds_what_it_stands_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    monkeypatch.setattr(torch, "__version__", "9.1.0+cpu")
    (message,) = said()
    assert f"These self-checks failed: {name}. " in message
