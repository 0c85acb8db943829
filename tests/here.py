"""Which device the tests run on: the environment's CASTWISE_TEST_DEVICE, which is cpu, sim (the simulated one) or cuda."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch

from tests.device import sim

DEVICE = os.environ.get("CASTWISE_TEST_DEVICE", "cpu")
"""The type of the device that models, data and sessions are on."""

FP32_MATMUL = {"cpu": "bf16", "cuda": "tf32"}.get(DEVICE, "ieee")
"""How the device can compute fp32 products other than torch does by itself, if it can."""

if DEVICE == sim.NAME:
    try:
        sim.register()
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    sim.register_in_interpreters()
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)
    torch.backends.cudnn.deterministic = True  # many tests hold two runs to the same bits


def until_known(step: Callable[[], object], fused: bool = True) -> None:
    """Step, and on a device that decides itself as often again as the host may need to hear of the first."""
    for _ in range(6 if fused and DEVICE != "cpu" else 1):
        step()
        if fused and DEVICE != "cpu":
            torch.accelerator.synchronize()


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    if DEVICE == sim.NAME:
        with sim.no_waits():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits() -> int:
    """How often the host has waited for the simulated device, for anything but an event."""
    return sum(count for kind, count in sim.waits().items() if kind is not sim.Wait.EVENT)
