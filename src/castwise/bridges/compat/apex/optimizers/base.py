"""What the replacements of Apex's optimizers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor


def refuse(what: str, instead: str) -> NoReturn:
    """Raise RuntimeError for an argument that torch does not have. The message names an alternative."""
    raise RuntimeError(f"{what} has no equivalent in torch; {instead}")


class ClearsAsSaid(torch.optim.Optimizer):
    """An optimizer whose argument ``set_grad_none`` decides whether ``zero_grad`` sets gradients to None or to zeros."""

    set_grad_none: bool
    said: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    """Attributes that hold constructor arguments, and that copies and pickles of the optimizer keep."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set gradients to None or to zeros. The default is the constructor's ``set_grad_none``."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        # torch leaves attributes that are not group options out of copies and pickles
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.said}}


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of an optimizer step with gradients enabled, and return its result; None if there is no closure."""
    with torch.enable_grad():
        return None if closure is None else closure()


def with_gradients(params: Iterable[Tensor], kind: str) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return the parameters that have gradients, with their gradients, as a pair of lists for each device and dtype.

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
