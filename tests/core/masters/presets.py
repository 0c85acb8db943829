"""Presets that the tests in this folder can run on this device."""

from __future__ import annotations

import castwise
from castwise.core.plans.plan import PRESETS
from castwise.errors import DeviceError
from tests.here import DEVICE


def _runs(name: str) -> bool:
    try:
        castwise.Amp(name, device=DEVICE).close()
    except DeviceError:  # a CPU without TF32
        return False
    return True


ALL = [name for name in PRESETS if _runs(name)]
MASTERS = [name for name, plan in PRESETS.items() if plan.keeps_masters]
