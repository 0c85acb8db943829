"""Average weights (EMA, SWA) from their fp32 masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import swa_utils

from castwise.core.masters.originals import assign, is_low
from castwise.core.masters.sync import settle
from castwise.core.masters.weights import in_fp32


class AveragedModel(swa_utils.AveragedModel):
    """A ``torch.optim.swa_utils.AveragedModel`` that averages fp32 masters, so EMA and SWA are right under every plan.

    Its parameters, its ``state_dict()`` and the arguments of ``avg_fn`` are fp32, whatever format the plan stores the
    model in. They are read from the masters if there are any. When the averaged model is called, it runs under the plan
    of the trained model, on weights that are rounded as the trained model's weights are. If it was created before
    ``prepare``, it runs in fp32.

    Args:
        model: The trained model, which is copied.
        device: Device of the average. The default is the model's device.
        avg_fn: As in torch: called for each parameter with the average, the weights and the number of averages so far.
        multi_avg_fn: As in torch: called like ``avg_fn``, but with lists of parameters. It works in place.
        use_buffers: Whether to average buffers too. Otherwise they are copied from the model.
    """

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        multi_avg_fn: Callable[[list[Tensor], list[Tensor], Tensor | int], None] | None = None,
        use_buffers: bool = False,
    ) -> None:
        many: Any = multi_avg_fn  # torch takes several kinds of lists
        super().__init__(model, device, avg_fn, many, use_buffers)
        self._stored: dict[str, torch.dtype] = {}
        for (name, average), source in zip(self.module.named_parameters(), _parameters(model), strict=True):
            if is_low(average):
                self._stored[name] = average.dtype
                assign(average, source.to(average.device, copy=True))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the averaged model, with its weights rounded to the formats in which the trained model stores them."""
        if not self._stored:
            return self.module(*args, **kwargs)
        stored = {
            name: average.to(self._stored[name])
            for name, average in self.module.named_parameters()
            if name in self._stored
        }
        return functional_call(self.module, stored, args, kwargs)

    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the model's weights, which are read from the fp32 masters where there are any.

        Args:
            model: The trained model, of the same architecture.
        """
        view: Any = SimpleNamespace(parameters=lambda: _parameters(model), buffers=model.buffers)
        super().update_parameters(view)


def _parameters(model: nn.Module) -> Iterator[Tensor]:
    settle(model)
    return map(in_fp32, model.parameters())
