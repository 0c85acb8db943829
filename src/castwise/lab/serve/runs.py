"""Run copies of a model as they are served, in fp32, with random rounding and under plans, and name what they return."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core.casting.trees import map_tensors
from castwise.core.model.arrival import widen_for
from castwise.core.plans.formats import FORMATS, Format
from castwise.core.plans.plan import Plan
from castwise.core.plans.text import shown
from castwise.core.plans.words import in_words
from castwise.core.ranks import ALONE
from castwise.core.session import Amp
from castwise.core.session.storage import silent_about_rounding
from castwise.errors import WorkloadError
from castwise.lab.parity.probes import REFERENCE, as_real, dithered
from castwise.lab.passes.choices import lowest_format
from castwise.lab.passes.isolation import seed_all, undisturbed
from castwise.lab.passes.passes import Original, observed_under
from castwise.lab.serve.outputs import named_outputs
from castwise.lab.serve.result import Metric
from castwise.lab.serve.verdicts import SLACK
from castwise.lab.timing.runners import uncompiled
from castwise.lab.workloads.workload import users_code

ALL = ("*",)
DRAWS = 4
"""Number of random roundings of the weights from which the noise of a metric is estimated."""

Call = Callable[[nn.Module, Any], Any]
Evaluate = Callable[[nn.Module], Mapping[str, float]]


class Runner:
    """Runs copies of a model under plans.

    Args:
        model: The model in fp32. It is copied, and the copy is put into evaluation mode.
        call: A function ``call(model, batch)`` that returns outputs.
        device: The device to run on.
        seed: The seed of random numbers and of random rounding.
        name: The caller, for errors.
        outputs: Names of the outputs to return, with ``*``; by default all that have a dimension.

    Attributes:
        model: The fp32 model.
        left_out: Names of what the model returned beside tensors and could not be read, with the names of the classes.

    Raises:
        WorkloadError: The model is prepared already, or cannot be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        device: torch.device,
        seed: int,
        name: str,
        outputs: Sequence[str] = ALL,
    ) -> None:
        if Amp.of(model) is not None:
            raise WorkloadError(
                f"{name}: the model is prepared under a plan, and may hold rounded weights; give the fp32 model as it was before"
            )
        self.call, self.device, self.seed, self.name, self._outputs = call, device, seed, name, tuple(outputs)
        self.left_out: dict[str, str] = {}
        self._original = Original(model, name, device)
        self.model = self._original.model.eval()

    @contextlib.contextmanager
    def running(self, plan: Plan, compiled: bool = False) -> Iterator[nn.Module]:
        """Yield a copy of the model that runs under a plan as it is served, without gradients.

        With ``compiled``, a plan that compiles is compiled, for inference mode; by default it runs without compiling.
        """
        stance = contextlib.nullcontext() if compiled else uncompiled()
        model = self._original.copy()
        with (
            undisturbed(),
            silent_about_rounding(),
            Amp(plan, device=self.device, group=ALONE) as amp,
        ):
            amp.prepare(model, inference=True, widen=widen_for(plan, model, serves=True))
            grads_off = torch.inference_mode() if compiled else torch.no_grad()
            with grads_off, stance, observed_under(plan, model, self.device):
                yield model

    def run(self, model: nn.Module, batch: Any, again: int = 0) -> dict[str, Tensor]:
        """Return the outputs of a batch by name. ``again`` changes the seed.

        Raises:
            WorkloadError: There are no outputs of the wanted names.
        """
        seed_all((self.seed + again) % 2**32)
        found = named_outputs(self.call(model, batch), self.left_out)
        chosen = {
            name: t for name, t in found.items() if any(fnmatchcase(name, each) for each in self._outputs)
        }
        if self._outputs == ALL:
            chosen = {name: t for name, t in chosen.items() if t.dim()} or chosen
        if not chosen:
            has = f"has {', '.join(found)}" if found else "has no tensors"
            wanted = f", none of them {', '.join(self._outputs)}" if found else "; return the model's outputs"
            raise WorkloadError(f"{self.name}: what the model returns {has}{wanted}")
        return chosen

    def generator(self, number: int = 0) -> torch.Generator:
        """Return a generator on the device, of its own for each number."""
        return torch.Generator(self.device).manual_seed(self.seed + number)

    def metrics(
        self, plan: Plan, evaluate: Evaluate, line: float, left_s: float = math.inf
    ) -> tuple[Metric, ...]:
        """Return the metrics of ``evaluate(model)`` in fp32 and under a plan, and what random rounding of the weights changes.

        If that takes longer than ``left_s`` seconds, the result is empty.
        """

        def run(model: nn.Module) -> dict[str, float]:
            seed_all(self.seed % 2**32)
            value = evaluate(model)
            if isinstance(value, Mapping) and value and all(map(_is_number, value.values())):
                return {str(name): _number(number) for name, number in value.items()}
            raise WorkloadError(
                f"{self.name}: evaluate returned {shown(value)}; return a mapping from the names of metrics to numbers, such as "
                "{'accuracy': 0.9}"
            )

        with users_code(f"{self.name}: evaluate failed in fp32"), self.running(REFERENCE) as model:
            begin = time.monotonic()
            fp32 = run(model)
            if (1 + DRAWS + 1) * (time.monotonic() - begin) > left_s:
                return ()
            rounding = Rounding(model, format_of(plan), self.generator())
            draws = []
            for _ in range(DRAWS):
                rounding.weights_()
                draws.append(run(model))
        with (
            users_code(f"{self.name}: evaluate failed under {in_words(plan)}"),
            self.running(plan) as model,
        ):
            under = run(model)
        found = []
        for name in {**fp32, **under}:
            value, now = fp32.get(name, math.nan), under.get(name, math.nan)
            moved = [draw.get(name, math.nan) - value for draw in draws]
            finite = [change for change in moved if math.isfinite(change)]
            noise = math.sqrt(math.fsum(change**2 for change in finite) / max(1, len(finite)))
            change = abs(now - value)
            slack = SLACK * (1.0 + 1e-9) * abs(value)  # 0.995 may be just below 1 - 0.005
            same = now == value or change <= slack or (math.isnan(now) and math.isnan(value))
            known = same or not (math.isfinite(value) and math.isfinite(now))
            # a metric of 0 would pass too, or rounding alone makes the metric infinite
            unknown = not known and (len(finite) < DRAWS or line * noise >= abs(value))
            explained = same or (math.isfinite(value) and change <= line * noise)
            found.append(Metric(name, value, now, noise, explained or unknown, unknown))
        return tuple(found)


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)


def _is_number(value: Any) -> bool:
    """Whether a metric's value is one number: Python's, NumPy's, or a tensor of one element."""
    try:
        _number(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(value, (str, bytes))


def format_of(plan: Plan) -> Format:
    """Return the coarsest format in which a plan computes, at least TF32, in which devices compute fp32 products."""
    low = lowest_format(plan)
    names = {"tf32", plan.fp32_matmul, plan.fp32_conv} & FORMATS.keys()
    return max(([low] if low else []) + [FORMATS[name] for name in names], key=lambda format: format.eps)


class Rounding:
    """Perturbs a model's weights and inputs at random by up to half a unit in the last place of a format.

    Inputs that the format holds exactly stay as they are: masks and pixels of 8 bits are no worse for being stored in it. Weights
    that the format holds exactly are perturbed too, since a model that was trained in it has no others.
    """

    def __init__(self, model: nn.Module, format: Format, generator: torch.Generator) -> None:
        self._parameters = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
        self._weights = [p.detach().clone() for p in self._parameters]
        self._format, self._generator = format, generator

    def weights_(self) -> None:
        """Perturb the weights that the model had at first."""
        for parameter, weight in zip(self._parameters, self._weights, strict=True):
            parameter.data.copy_(dithered(weight, self._format.eps, self._generator))

    def inputs(self, batch: Any) -> Any:
        """Return a batch with perturbed floating tensors."""
        return map_tensors(self._perturbed, batch)

    def _perturbed(self, tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return torch.view_as_complex(self._perturbed(as_real(tensor)))
        if not tensor.is_floating_point():
            return tensor
        exact = ~tensor.isfinite()
        if self._format.name != "tf32":  # which no dtype stores
            exact |= tensor.to(self._format.dtype).to(tensor.dtype) == tensor
        return torch.where(exact, tensor, dithered(tensor, self._format.eps, self._generator))
