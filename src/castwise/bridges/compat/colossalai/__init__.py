"""Colossal-AI's AMP with its engine and trainer, run by castwise.

    from castwise.compat import colossalai

    colossalai.launch_from_torch(config=dict(fp16=dict(mode=colossalai.amp.AMP_TYPE.TORCH), clip_grad_norm=1.0))
    engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

or, with the original import lines, after ``castwise.compat.install()``.

``plans``: translates the modes' options to plans. ``amp``: ``convert_to_amp``. ``context``, ``core``: the configuration
and the process groups. ``initialize``: from a configuration to an engine. ``engine``: it, its schedules and
accumulation. ``sharding``: what ``zero`` configures. ``trainer``: the loop, with hooks. ``nn``, ``utils``, ``logging``,
``builder``, ``registry``: further modules that scripts import.
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
