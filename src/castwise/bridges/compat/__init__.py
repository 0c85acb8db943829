"""Replacements of other libraries, under those libraries' names: scripts written for the libraries run on castwise.

``apex`` replaces ``apex.amp`` and the parts of Apex that scripts import along with it. ``colossalai`` replaces
Colossal-AI's AMP, engine and trainer, and ``torch_amp`` replaces ``torch.cuda.amp`` and ``torch.cpu.amp``. ``coverage``
says which names of the other libraries are available. ``installing`` makes ``import apex`` and ``import colossalai`` find
the replacements.
"""

from __future__ import annotations

__all__ = ["install", "uninstall"]

from castwise.bridges.compat.installing import install, uninstall
