"""The coverage list is correct: names listed as present exist, and names listed as absent raise."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest
import torch

from castwise.bridges.compat.apex import PARTS, amp
from castwise.bridges.compat.coverage import STATUSES, Covered, covered

COVERED = covered("apex")
NAMES = {entry.name: entry for entry in COVERED}


def resolve(name: str) -> Any:
    """Import a dotted name of Apex from the drop-in."""
    parts = name.removeprefix("apex.").split(".")
    for length in range(len(parts), 0, -1):
        home = ".".join(["castwise.bridges.compat.apex", *parts[:length]])
        try:
            found: Any = importlib.import_module(home)
        except ModuleNotFoundError:
            continue
        if parts[:length] == ["amp", "_amp_state"]:
            found = amp._amp_state  # the object that `from apex.amp import _amp_state` imports
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"No module named {name!r}")


@pytest.mark.parametrize(
    "entry", [e for e in COVERED if e.name.startswith("apex.") and " " not in e.name], ids=lambda e: e.name
)
def test_names_are_there_or_not_as_the_list_says(entry: Covered) -> None:
    name, argument = re.fullmatch(r"([\w.]+)(?:\((\w+)\))?", entry.name).groups()
    if entry.status == "absent":
        with pytest.raises((ImportError, AttributeError)):
            resolve(name)
    else:
        amp.initialize(torch.nn.Linear(1, 1), enabled=False)  # options exist after the first call
        found = resolve(name)
        if argument:
            target = found.__init__ if inspect.isclass(found) else found
            assert argument in inspect.signature(target).parameters


@pytest.mark.parametrize("part", PARTS)
def test_no_public_name_is_left_out_of_the_list(part: str) -> None:
    module = importlib.import_module(f"castwise.bridges.compat.apex.{part}")
    listed = {name.split("(")[0].split(".")[2] for name in NAMES if name.startswith(f"apex.{part}.")}
    left_out = set(module.__all__) - listed - {"MultiTensorApply"}
    assert not left_out


def test_every_argument_of_initialize_and_scale_loss_is_listed() -> None:
    for name in ("initialize", "scale_loss", "init"):
        parameters = set(inspect.signature(getattr(amp, name)).parameters) - {"loss", "optimizers", "enabled"}
        if name == "initialize":
            parameters |= {"optimizers", "enabled"}
        assert parameters <= {
            entry.split("(")[1].rstrip(")") for entry in NAMES if entry.startswith(f"apex.amp.{name}(")
        }


@pytest.mark.parametrize("package", ["apex", "colossalai"])
def test_rows_are_listed_once_and_say_what_to_expect(package: str) -> None:
    rows = covered(package)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.status in STATUSES, row
        assert row.status == "works" or row.note, row
        assert not set("|\n") & set(row.note), row  # the note is a table cell
