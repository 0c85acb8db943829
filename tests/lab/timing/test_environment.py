"""The record of the environment in which a result was measured."""

from __future__ import annotations

import getpass
import os
import re
import socket
from dataclasses import asdict

import pytest
import torch

import castwise
from castwise.lab.timing.environment import command_line, environment


def test_holds_versions_and_device_and_gives_nobody_away() -> None:
    record = environment("cpu")
    assert record.torch == torch.__version__
    assert record.castwise == castwise.__version__
    assert record.threads == torch.get_num_threads()
    assert record.cores >= 1
    assert record.device
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record.date)
    text = " ".join(str(value) for value in asdict(record).values())
    assert socket.gethostname() not in text
    assert os.path.expanduser("~") + "/" not in text
    assert os.getcwd() not in text
    assert getpass.getuser() not in record.command.split()


def test_commit_is_that_of_this_checkout() -> None:
    commit = environment().commit
    assert commit is None or re.fullmatch(r"[0-9a-f]{12}\+?", commit)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/home/joe/.venv/bin/castwise", "bench", "sine?size=64"], "castwise bench sine?size=64"),
        (["castwise", "bench", "/home/joe/my work.py:net"], 'castwise bench "my work.py:net"'),
        (["castwise", "train", "rel/dir/net.py:net", "--plan=/tmp/x/plan.json"], "castwise train rel/dir/net.py:net --plan=plan.json"),
        (["~/bin/castwise", "bench", "~/net.py:net"], "castwise bench net.py:net"),
        (["/x/castwise/__main__.py", "doctor"], "castwise doctor"),
    ],
)  # fmt: skip
def test_command_keeps_names_and_drops_places(argv: list[str], line: str) -> None:
    assert command_line(argv) == line


@pytest.mark.parametrize(
    ("flags", "ends"), [("fpu avx512f amx_tile amx_bf16", " and AMX"), ("fpu avx512f", "")]
)
def test_capability_of_a_cpu_names_amx_beside_its_vector_units(monkeypatch, flags: str, ends: str) -> None:
    said = f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n"
    monkeypatch.setattr("castwise.lab.timing.environment.cpuinfo", lambda: said)
    assert environment("cpu").capability == torch.backends.cpu.get_cpu_capability() + ends
