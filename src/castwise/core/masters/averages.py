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
    """Averages the weights of a model in fp32, for an exponential moving average or stochastic weight averaging.

    Use it for a model that :meth:`castwise.Amp.prepare` has prepared, in place of
    ``torch.optim.swa_utils.AveragedModel``, whose arguments it takes. torch's class averages the parameters as they are
    stored. If a precision plan stores them in bf16 or fp16, torch's class averages rounded values. This class averages
    the fp32 master weights instead, which are the fp32 copies that the optimizer updates. If a parameter has no master
    weight, its own value is averaged.

    The parameters of the average, its ``state_dict()`` and the arguments of ``avg_fn`` are fp32. When the averaged
    model is called, it runs under the plan of the trained model. Its weights are rounded to the formats in which the
    trained model stores them. An averaged model that was created before :meth:`castwise.Amp.prepare` runs in fp32.

    Args:
        model: The trained model, which is copied.
        device: The device of the average. The default is the device of the model.
        avg_fn: A function that computes the new average of a parameter, as in torch. It takes the average, the weights
            and the number of averages so far.
        multi_avg_fn: A function that updates all averages in place, as in torch. It takes a list of averages, a list of
            weights and the number of averages so far.
        use_buffers: Whether to average buffers too. Otherwise they are copied from the model at each update.
    """

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        multi_avg_fn: Callable[[list[Tensor], list[Tensor], Tensor | int], None] | None = None,
        use_buffers: bool = False,
    ) -> None:
        many: Any = multi_avg_fn  # torch's annotation differs
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
        """Add the current weights of the trained model to the average.

        The values are those of the fp32 master weights, the fp32 copies that the optimizer updates. If a parameter has
        no master weight, its own value is used.

        Args:
            model: The trained model, with the same architecture as the average.
        """
        view: Any = SimpleNamespace(parameters=lambda: _parameters(model), buffers=model.buffers)
        super().update_parameters(view)


def _parameters(model: nn.Module) -> Iterator[Tensor]:
    settle(model)
    return map(in_fp32, model.parameters())
