"""Save and resume a training, across plans and layouts.

    saving = checkpoint.save("runs/a", step, model=model, optimizers=optimizer, amp=amp, asynchronous=True)
    ...
    found = checkpoint.newest("runs/a")
    if found:
        step = checkpoint.load(found, model=model, optimizers=optimizer, amp=amp).step

Tensors are written as plain bytes, each rank its own shards, and load under another layout. Weights are written in fp32
under the model's own keys, optimizer state under the names of the model's parameters, and so they load under another
plan. Everything that is not a tensor is JSON, checked before anything is made of it; nothing is a pickle.

``tree``: nested values as JSON and tensors. ``contents``: the saved parts of a model, its optimizers and a session.
``folder``: folders of checkpoints, and how a checkpoint becomes complete. ``lock``: one process per folder.
``storage``: tensors to files and back. ``values``: checks of everything that is not a tensor. ``options``: which
options an optimizer accepts. ``restore`` and ``undo``: one rank's part of a load, and its undo. ``saving`` and
``loading``: the public calls.
"""

from __future__ import annotations

from castwise.core.checkpoint.folder import Skipped
from castwise.core.checkpoint.loading import Found, Loaded, load, newest
from castwise.core.checkpoint.saving import Saving, save

__all__ = ["Found", "Loaded", "Saving", "Skipped", "load", "newest", "save"]
