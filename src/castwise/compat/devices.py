"""Where scripts of other libraries run."""

from __future__ import annotations

from castwise import autocast

__all__ = ["default_device_type"]


def default_device_type() -> str:
    """Device type of the accelerator at hand, else ``"cpu"``: the one that ``castwise.autocast`` takes by itself."""
    return autocast(enabled=False).device
