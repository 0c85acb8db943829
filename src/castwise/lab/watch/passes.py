"""Run forward and backward of a step on a copy of a model, from given weights and states of the random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core.casting.trees import to_device
from castwise.core.plans.plan import Plan
from castwise.core.scaler import gradients as of_scaler
from castwise.core.session import Amp
from castwise.lab.passes.passes import under
from castwise.lab.watch.moments import set_generators
from castwise.lab.workloads.workload import check_loss, users_code

Loss = Callable[[nn.Module, Any], Any]
"""``loss(model, batch)`` -> the loss. Several losses are returned as a mapping by name, or as a sequence."""


@dataclass(frozen=True)
class Ran:
    """The losses and gradients of a step that was run on a copy of a model.

    Attributes:
        losses: The losses in order, as 0-dim tensors.
        names: Names of the losses.
        gradients: Gradients by parameter name, multiplied by the loss scale.
        nonfinite: Names of parameters whose gradients are not finite.
    """

    losses: list[Tensor]
    names: list[str]
    gradients: dict[str, Tensor]
    nonfinite: list[str]

    @property
    def finite(self) -> bool:
        """Whether losses and gradients are finite. The host waits for the device."""
        return not self.nonfinite and all(bool(torch.isfinite(value).all()) for value in self.losses)

    @property
    def loss(self) -> float:
        """The loss of the step, as :func:`mean_loss` computes it."""
        return mean_loss(zip(self.names, self.losses, strict=True))


def mean_loss(losses: Iterable[tuple[str, Tensor]]) -> float:
    """Return the loss of a step from its losses by name. The host waits for the device.

    The losses of each name are averaged over microbatches, or evaluations. The averages are then summed over the names.
    """
    by: dict[str, list[float]] = {}
    for name, value in losses:
        by.setdefault(name, []).append(float(value))
    return sum(sum(values) / len(values) for values in by.values())


def run_step(
    call: str,
    model: nn.Module,
    loss: Loss,
    plan: Plan,
    device: torch.device,
    moments: Sequence[tuple[Any, Mapping[str, Any]]],
    load: Callable[[nn.Module], None],
    *,
    names: Sequence[Sequence[str]] = (),
    scales: Mapping[str, float] | None = None,
    keep: bool = True,
) -> Ran:
    """Run the microbatches of a step under a plan, and return their losses and the gradients.

    Args:
        call: Name of the calling function, for error messages.
        model: A copy that may be changed.
        loss: ``loss(model, batch)``.
        plan: The plan to run under.
        device: The device to run on.
        moments: For each microbatch, the batch and the states of the random generators before it.
        load: Loads the weights into the prepared model.
        names: Names of the losses of each microbatch, for losses that are returned as a sequence.
        scales: Loss scales by name of the loss, instead of the plan's initial loss scales.
        keep: Whether to return copies of the gradients.

    Raises:
        CastwiseError: The plan does not fit, or the loss is invalid.
        ValueError: A state of a random generator is invalid.
    """
    model.to(device)
    losses: list[Tensor] = []
    called: list[str] = []
    with under(plan, model, device) as amp:
        load(model)
        _set_scales(amp, scales or {})
        model.zero_grad(set_to_none=True)
        for at, (batch, random) in enumerate(moments):
            set_generators(random)
            with users_code(f"{call}: loss(model, batch) failed"):
                values = by_name(loss(model, to_device(batch, device)), names[at] if at < len(names) else ())
            for name, value in values:
                losses.append(check_loss(value, call).detach().clone())
                called.append(name)
                amp.backward(value, name, retain_graph=len(values) > 1)
        kept = (
            {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
            if keep
            else {}
        )
        return Ran(losses, called, kept, gradients_not_finite(model))


def by_name(given: Any, names: Sequence[str] = ()) -> list[tuple[str, Tensor]]:
    """Return the losses of a microbatch with their names."""
    if isinstance(given, Mapping):
        return list(given.items())
    if isinstance(given, (tuple, list)):
        return [(names[at] if at < len(names) else "loss", value) for at, value in enumerate(given)]
    return [(names[0] if names else "loss", given)]


def total(given: Any) -> Tensor:
    """Return the sum of all losses of a microbatch."""
    first, *others = (value for _, value in by_name(given))
    return sum(others, first)


def gradients_not_finite(model: nn.Module) -> list[str]:
    """Return the names of parameters with a non-finite gradient. The host waits for the device."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(of_scaler.values(parameter.grad)).all())
    ]


def _set_scales(amp: Amp, scales: Mapping[str, float]) -> None:
    """Set the loss scales of several losses, by name of the loss."""
    state = amp.state_dict()
    if not state["scaler"] or not scales:
        return
    first = state["scaler"]
    others = {
        name: {"scale": scale, "_growth_tracker": 0, "hysteresis_tracker": 0}
        for name, scale in scales.items()
        if name != "loss"
    }
    amp.load_state_dict({
        **state,
        "scaler": {**first, "scale": scales.get("loss", first["scale"]), "losses": others},
    })


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use this many threads in the ``with`` block: the order of summation depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(count, 1024)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
