"""``Amp``: one precision plan, carried through a training loop.

    amp = castwise.Amp("bf16-mixed")
    model, optimizer = amp.prepare(model, optimizer)
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        amp.backward(loss)
        amp.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()

``amp``: the session itself, on one page. ``checks``: what ``prepare`` refuses. ``apply`` and ``storage``: what it changes, through
``undo``, the undo log. ``members``: what was prepared. ``guard``: the scaler of a plan. ``wrapping``: what parallel
wrappers ask of it.
"""

from __future__ import annotations

from castwise.core.session.amp import Amp

__all__ = ["Amp"]
