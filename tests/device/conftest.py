"""These tests need a device that is not the CPU; tests/test_device.py runs them on the simulated one."""

from __future__ import annotations

from tests.here import DEVICE

collect_ignore_glob = ["test_*.py"] if DEVICE == "cpu" else []
