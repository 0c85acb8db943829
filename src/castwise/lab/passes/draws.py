"""Repeat the random draws of a reference run in another run: two formats must get the same noise to be compared.

With one seed, dropout masks agree across formats on a CPU, but ``randn_like`` and ``rand_like`` of a low tensor draw
other numbers than those of an fp32 tensor, and on a GPU masks can differ too. So the result of every operator that
torch tags as random is recorded in the reference and replaces the result in the other run.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.lab.passes.observers import Args, Kwargs, Observer, Run


def _drawn(op: Any, out: Any) -> Tensor | None:
    """The random part of an operator's result."""
    name = op.overloadpacket.__name__
    if name == "native_dropout":
        return out[1]  # type: ignore[no-any-return]
    if not isinstance(out, Tensor) or name.startswith(("rrelu", "_scaled_dot")):
        return None
    # masks are 0 and 1: a byte is enough
    return out.detach().bool() if name.startswith("bernoulli") else out.detach().clone()


def _is_random(op: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> bool:
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    name = op.overloadpacket.__name__
    if name.startswith("_scaled_dot"):  # tagged as random because of its dropout, which is usually 0
        given = {**dict(zip(_torch.operators.argument_names(op), args, strict=False)), **kwargs}
        return bool(given.get("dropout_p", 0.0))
    return True


class Draws(Observer):
    """Records the random draws of a first pass, and repeats them in each later pass of the same code.

    Attributes:
        tape: Each random operator of the first pass with its draw; None for a draw that cannot be repeated: attention with dropout
            inside a kernel.
        strayed: Number of draws in the last pass without a counterpart in the first; these are new.
    """

    def __init__(self) -> None:
        self.tape: list[tuple[str, Tensor | None]] | None = None
        self._rest: list[tuple[str, Tensor | None]] | None = None
        self.strayed = 0

    def around(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Start a pass."""
        self._rest = None if self.tape is None else [*self.tape]
        self.tape = [] if self.tape is None else self.tape
        self.strayed = 0
        return super().around(model)

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run the operator; if it is random, record its draw or repeat the recorded one."""
        out = run(
            op, args, kwargs
        )  # also when repeating: its shape and format are needed, and the generator must advance
        if not _is_random(op, kwargs, args):
            return out
        name = op.overloadpacket.__name__
        if self._rest is None:
            assert self.tape is not None
            self.tape.append((name, _drawn(op, out)))
            return out
        if not self._rest or self._rest[0][0] != name:
            self.strayed += 1
            return out
        drawn = self._rest.pop(0)[1]
        if name == "native_dropout" and drawn is not None and drawn.shape == out[1].shape:
            if len(args) > 2 and args[2] is False:  # in evaluation it is the identity
                return out
            p = args[1]
            scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
            return (args[0] * drawn * scale, drawn)
        if drawn is None or not isinstance(out, Tensor) or drawn.shape != out.shape:
            self.strayed += 1
            return out
        return out.copy_(drawn)
