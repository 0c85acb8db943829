"""Shared parts of Apex's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor


def refuse(what: str, instead: str) -> NoReturn:
    """Raise for an argument without equivalent in torch, with an alternative."""
    raise RuntimeError(f"{what} has no equivalent in torch; {instead}")


class ClearsAsSaid(torch.optim.Optimizer):
    """An optimizer whose constructor decides how ``zero_grad`` clears."""

    set_grad_none: bool
    said: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    """Attributes that hold arguments of the class."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, by default as ``set_grad_none`` specified."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        # torch leaves attributes that are not group options out of copies and pickles
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.said}}


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """The result of a step's closure, called with gradients enabled; None without closure."""
    with torch.enable_grad():
        return None if closure is None else closure()


def with_gradients(params: Iterable[Tensor], kind: str) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Parameters that have gradients, and these gradients, in lists by device and dtype.

    Raises:
        RuntimeError: A gradient is sparse; the message is Apex's, with the ``kind`` of optimizer.
    """
    lists: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for parameter in params:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            raise RuntimeError(
                f"{kind} does not support sparse gradients, please consider SparseAdam instead"
            )
        held, grads = lists.setdefault((parameter.device, parameter.dtype), ([], []))
        held.append(parameter)
        grads.append(grad)
    return list(lists.values())
