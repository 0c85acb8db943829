"""Apply a precision plan to a training loop, with the class ``Amp``.

    amp = castwise.Amp("bf16-mixed")
    model, optimizer = amp.prepare(model, optimizer)
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        amp.backward(loss)
        amp.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()

The modules:

- ``amp`` defines the class.
- ``checks`` raises errors for what ``prepare`` cannot prepare.
- ``apply`` and ``storage`` change models and optimizers. Each change has an entry in the undo log of ``undo``.
- ``members`` keeps the prepared models and optimizers.
- ``guard`` makes the scaler for a plan.
- ``wrapping`` handles DistributedDataParallel and pipelines.
"""

from __future__ import annotations

from castwise.core.session.amp import Amp

__all__ = ["Amp"]
