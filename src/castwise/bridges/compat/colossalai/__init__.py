"""Replaces Colossal-AI's AMP, engine and trainer, implemented with castwise.

    from castwise.compat import colossalai

    colossalai.launch_from_torch(config=dict(fp16=dict(mode=colossalai.amp.AMP_TYPE.TORCH), clip_grad_norm=1.0))
    engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

After ``castwise.compat.install()``, the import lines of Colossal-AI work unchanged.

``plans`` translates the options of the AMP modes to castwise plans, and ``amp`` defines ``convert_to_amp``. ``context`` and
``core`` hold the configuration and the process groups. ``initialize`` makes an engine from a configuration. ``engine``
defines the engine, its schedules and gradient accumulation. ``sharding`` implements the option ``zero``. ``trainer`` is the
training loop with its hooks. ``nn``, ``utils``, ``logging``, ``builder`` and ``registry`` are further modules that scripts
import.
"""

from __future__ import annotations

from castwise.bridges.compat.colossalai import (
    amp,
    builder,
    context,
    core,
    engine,
    logging,
    nn,
    registry,
    trainer,
    utils,
)
from castwise.bridges.compat.colossalai.initialize import (
    get_default_parser,
    initialize,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from castwise.bridges.compat.coverage import missing_attribute

__all__ = [
    "amp",
    "builder",
    "context",
    "core",
    "engine",
    "get_default_parser",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "logging",
    "nn",
    "registry",
    "trainer",
    "utils",
]
__getattr__ = missing_attribute("colossalai")
