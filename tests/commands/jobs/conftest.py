"""Fixtures of the tests of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from castwise.commands.jobs import Event
from castwise.commands.jobs.doctor import doctor
from castwise.commands.jobs.doctor_result import DoctorResult
from castwise.lab.timing.rates import Kernel, kernels


@pytest.fixture
def tiny() -> str:
    """Return the path of the tiny workloads, for ``f"{tiny}:mlp"``."""
    return str(Path(__file__).with_name("tiny_workloads.py"))


@pytest.fixture(scope="session")
def examined() -> tuple[DoctorResult, list[Event]]:
    """Run ``doctor`` on the CPU; return its result and its progress events."""
    told: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("castwise.lab.timing.rates.kernels", first_kernel)
        return doctor(small=True, device="cpu", progress=told.append), told


def first_kernel(device_type: str, *, small: bool = False) -> tuple[Kernel, ...]:
    """Return one operator to measure; measuring all of them takes seconds and has its own test."""
    return kernels(device_type, small=small)[:1]


@pytest.fixture
def rates_are_known(examined: tuple[DoctorResult, list[Event]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``doctor`` reuse the rates of ``examined``, since measuring them takes longer than everything else."""
    found, _ = examined
    monkeypatch.setattr("castwise.commands.jobs.doctor.measure_rates", lambda *_, **__: found.rates)
    monkeypatch.setattr("castwise.commands.jobs.doctor.measure_bandwidth", lambda *_, **__: found.bandwidth)
