"""Save a training run and resume it, also under another precision plan or another layout of ranks.

    saving = checkpoint.save("runs/a", step, model=model, optimizers=optimizer, amp=amp, asynchronous=True)
    ...
    found = checkpoint.newest("runs/a")
    if found:
        step = checkpoint.load(found, model=model, optimizers=optimizer, amp=amp).step

Each rank writes its own shards, as plain bytes, and they load under another layout. Weights are written in fp32 under
the keys of the model's state dict. Optimizer state is written under the names of the model's parameters. So both load
under another plan. Everything that is not a tensor is JSON, which is checked before it is used. Nothing is a pickle.

``saving`` and ``loading`` have the public functions. ``contents`` collects what is saved of a model, its optimizers
and a session. ``names`` names the weights. ``tree`` turns nested values into JSON and tensors. ``storage`` writes
tensors to files and reads them. ``folder`` manages folders of checkpoints and completes a checkpoint, and ``lock``
allows one process per folder. ``values`` checks everything that is not a tensor, and ``options`` knows which options
an optimizer accepts. ``restore`` does one rank's part of a load, and ``undo`` reverts it.
"""

from __future__ import annotations

from castwise.core.checkpoint.folder import Skipped
from castwise.core.checkpoint.loading import Found, Loaded, load, newest
from castwise.core.checkpoint.saving import Saving, save

__all__ = ["Found", "Loaded", "Saving", "Skipped", "load", "newest", "save"]
