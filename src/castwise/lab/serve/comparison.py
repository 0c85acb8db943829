"""Compare a served model's outputs under plans with those in fp32, in single steps for callers that judge many plans."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting.trees import tensors_in, to_device
from castwise.core.model.copying import copy_of
from castwise.core.plans.formats import LOW, Format
from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.core.session.process import check_device
from castwise.errors import WorkloadError
from castwise.lab.parity.positions import Positions, PositionWatch
from castwise.lab.parity.probes import REFERENCE
from castwise.lab.passes.isolation import undisturbed
from castwise.lab.passes.observers import observed
from castwise.lab.passes.regions import Part, exempt, find_parts, only
from castwise.lab.serve.outputs import (
    Difference,
    Kind,
    compared,
    difference,
    kind_of,
    mean_difference,
    reshaped,
    sampled,
)
from castwise.lab.serve.result import OutputParity
from castwise.lab.serve.runs import ALL, Call, Evaluate, Rounding, Runner, format_of
from castwise.lab.serve.verdicts import LINE, REACH, SLACK, Verdict, added, decide
from castwise.lab.timing.runners import outputs_of
from castwise.lab.workloads.workload import Workload, about_data, users_code

LEAST = 2
"""Minimum number of batches, since there is no interval over fewer."""
REPEATS = 1e-4
"""Outputs are random if two runs of a batch in fp32 differ by more than this share of their norm: kernels may sum in any order."""
OUTPUT_BATCHES = 8
"""Number of batches whose outputs a search compares, and of fresh batches for the verification."""
BLATANT = 4.0
"""A plan fails at once if the interval of its error begins at this multiple of the line."""
ROUNDINGS = 4
"""Number of random roundings of each batch, if the first does not let a plan pass. A choice between near equals changes rarely, so
that one rounding may not show it."""


class OutputTest:
    """Compares a model's outputs under plans with those in fp32.

    Args:
        model: The model in fp32. It is copied, and the copy is put into evaluation mode.
        call: A function ``call(model, batch)`` that returns outputs: tensors in tuples, lists, mappings or dataclasses.
        batches: An iterator of batches, on any device.
        device: The device to run on.
        seed: The seed of the random rounding.
        line: The multiple of the error of rounding up to which a plan passes.
        call_name: The caller, for errors.
        outputs: Names of the outputs to compare, with ``*``; by default all that have a dimension, so not a loss.
        kinds: What outputs are for, by name with ``*``, where the rule of :mod:`castwise.lab.serve.outputs` does not fit.

    Attributes:
        line: The line.
        seen: The batches, on the device.
        positions: Which sequence positions the first forward pass used.

    Warns:
        UserWarning: The model is in training mode.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        batches: Iterator[Any],
        device: torch.device,
        *,
        seed: int = 0,
        line: float = LINE,
        call_name: str = "output_parity",
        outputs: Sequence[str] = ALL,
        kinds: Mapping[str, Kind] | None = None,
    ) -> None:
        if model.training:
            warnings.warn(
                f"{call_name}: the model is in training mode, in which dropout draws and BatchNorm uses the batch's statistics. "
                "A copy is tested in evaluation mode; call model.eval() before you serve the model",
                stacklevel=3,
            )
        self.line, self.device, self.positions = line, device, Positions()
        self.seen: list[Any] = []
        self._batches, self._name, self._given = batches, call_name, dict(kinds or {})
        self._runner = Runner(model, call, device, seed, call_name, outputs)
        self._kinds: dict[str, Kind] = {}
        self._fp32: list[dict[str, Tensor]] = []
        self._shapes: list[dict[str, torch.Size]] = []
        self._floors: dict[str, list[list[dict[str, Difference]]]] = {}
        self._parts: tuple[Part, ...] | None = None

    @property
    def samples(self) -> int:
        """The number of samples in the batches: the sum of the first dimensions of the first output."""
        return self._samples

    @property
    def not_compared(self) -> str:
        """A sentence that names what the model returns beside tensors; empty without any."""
        found = [f"{name} ({kind})" for name, kind in self._runner.left_out.items()]
        return f"Not compared: {', '.join(found)}." if found else ""

    def reference(self, count: int) -> None:
        """Run fp32 on ``count`` batches. The first batch runs twice.

        Raises:
            WorkloadError: There are too few batches. Or the outputs have no tensors, are random, have another shape when the
                same batch runs again, or are not finite.
        """
        if count < LEAST:
            raise WorkloadError(f"{self._name}: {count} batches; needs at least {LEAST}")
        given = list(itertools.islice(self._batches, count))
        if len(given) < count:
            raise WorkloadError(
                f"{self._name}: the batches ended after {len(given)} of {count}; give {count} batches or ask for fewer"
            )
        self.seen = [to_device(batch, self.device) for batch in given]
        self._samples = 0
        with self._runner.running(REFERENCE) as model:
            held = {f"its buffer {name}": buffer for name, buffer in model.named_buffers()}
            held |= {f"tensor {number} of its batch": t for number, t in enumerate(tensors_in(self.seen[0]))}
            before = {
                name: tensor.clone() for name, tensor in held.items() if _torch.tensors.is_dense(tensor)
            }
            watch = PositionWatch(self.positions, model, self.seen[0])
            with observed(model, watch):
                again = self._runner.run(model, self.seen[0], again=1)
            self._kinds = {name: self._kind(name, output) for name, output in again.items()}
            for number, batch in enumerate(self.seen):
                out = self._runner.run(model, batch)
                if number == 0:
                    changed = [name for name, values in before.items() if not torch.equal(held[name], values)]
                    self._check_repeats(again, out, changed)
                self._check(out, batch)
                first = next(iter(out.values()))
                self._samples += first.shape[0] if first.dim() else 1
                self._fp32.append({name: sampled(output, self._kinds[name]) for name, output in out.items()})
                self._shapes.append({name: output.shape for name, output in out.items()})
        if not any(compared(each[name], kind) for each in self._fp32 for name, kind in self._kinds.items()):
            raise WorkloadError(
                f"{self._name}: {', '.join(self._kinds)}: empty or infinite in all {count} batches, so there is nothing to compare; "
                "give batches whose outputs have values, or other outputs"
            )

    def _kind(self, name: str, output: Tensor) -> Kind:
        return next(
            (kind for pattern, kind in self._given.items() if fnmatchcase(name, pattern)),
            kind_of(name, output),
        )

    def _check_repeats(
        self, one: Mapping[str, Tensor], other: Mapping[str, Tensor], changed: Sequence[str]
    ) -> None:
        """Raise if two runs of a batch differ. ``changed`` names the tensors that the runs changed."""
        for name, a in one.items():
            b = other.get(name)
            if b is None or a.shape != b.shape:
                raise WorkloadError(
                    f"{self._name}: {name} has another shape when the same batch runs again ({tuple(a.shape)}, then "
                    f"{None if b is None else tuple(b.shape)}), so outputs cannot be compared; give outputs that depend on the "
                    "batch alone"
                )
            kind = self._kinds[name]
            found = difference(sampled(a, kind), sampled(b, kind), kind)
            differs = (
                found.changed > SLACK * found.decisions
                if kind == "integers"
                else found.error > REPEATS**2 * found.signal
            )
            if differs and changed:
                raise WorkloadError(
                    f"{self._name}: {name} differs when the same batch runs again in fp32, since a call of the model changes {changed[0]}; "
                    "give a model whose outputs depend on the batch alone, or compare other outputs"
                )
            if differs:
                raise WorkloadError(
                    f"{self._name}: {name} is random: it differs when the same batch runs again in fp32; draw random numbers "
                    "outside of the model and give them in the batch, or compare other outputs"
                )

    def _check(self, out: Mapping[str, Tensor], batch: Any) -> None:
        if out.keys() != self._kinds.keys():
            raise WorkloadError(
                f"{self._name}: the outputs of one batch are {', '.join(self._kinds)}, and of another {', '.join(out)}; "
                "return the same outputs for each batch"
            )
        for name, output in out.items():
            if bool(output.isnan().any()):
                raise WorkloadError(f"{self._name}: {name} is NaN in fp32; {about_data(batch)}")

    def test(self, plan: Plan, compiled: bool = False) -> OutputParity:
        """Run the batches under a plan and decide.

        Args:
            plan: The plan.
            compiled: Whether to compile a plan that compiles, instead of running it without compiling.

        Raises:
            DeviceError: The device cannot run the plan.
            CastwiseError: The plan does not fit the model, or the model fails under the plan.
        """
        check_device(plan, self.device.type)
        found = self._differences(plan, range(len(self.seen)), compiled)
        result = self._decided(plan, found)
        if result.verdict != "pass" and result.low < BLATANT * self.line:
            self._draw(format_of(plan), ROUNDINGS)
            result = self._decided(plan, self._differences(plan, range(len(self.seen)), compiled))
        return dataclasses.replace(result, reason=result.explained())

    def _decided(self, plan: Plan, found: Sequence[Mapping[str, Difference]]) -> OutputParity:
        floors, eps = self._floor(plan), format_of(plan).eps
        outputs = tuple(
            decide(
                name, kind, [each[name] for each in self._fp32], [each[name] for each in found],
                [each[name] for each in floors], self.line, eps,
            )
            for name, kind in self._kinds.items()
        )  # fmt: skip
        more = {name for each in found for name in each if name not in self._kinds}
        outputs += tuple(added(name) for name in sorted(more))
        verdicts = {each.verdict for each in outputs}
        verdict: Verdict = (
            "fail" if "fail" in verdicts else "undecided" if "undecided" in verdicts else "pass"
        )
        return OutputParity(
            plan, verdict, "", outputs, self.line, len(self.seen), self._samples, self.positions.length or None,
            note=" ".join(filter(None, [self.positions.note, self.not_compared])),
        )  # fmt: skip

    def _differences(
        self, plan: Plan, batches: Iterable[int], compiled: bool = False
    ) -> list[dict[str, Difference]]:
        """Run batches under a plan and return how the outputs differ from fp32's."""
        floors = self._floor(plan)
        failed = f"{self._name}: the model runs in fp32, but fails under {in_words(plan)}"
        with users_code(failed), self._runner.running(plan, compiled) as model:
            return [self._against(at, self._runner.run(model, self.seen[at]), floors[at]) for at in batches]

    def _against(
        self, at: int, out: Mapping[str, Tensor], floor: Mapping[str, Difference] | None = None
    ) -> dict[str, Difference]:
        found = {}
        for name, kind in self._kinds.items():
            fp32 = self._fp32[at][name]
            noise = floor[name].noise if floor else None
            reach = None if noise is None else REACH * self.line * noise
            if name in out and out[name].shape == self._shapes[at][name]:
                found[name] = difference(fp32, sampled(out[name], kind), kind, reach)
            else:
                found[name] = reshaped(fp32, kind)
        return found | {name: Difference(reshaped=True) for name in out.keys() - found.keys()}

    def _floor(self, plan: Plan) -> list[dict[str, Difference]]:
        """Return, for each batch, how fp32's outputs change with weights and inputs that are rounded at random."""
        format = format_of(plan)
        self._draw(format, 1)
        draws = self._floors[format.name]
        return [
            {name: mean_difference([draw[at][name] for draw in draws]) for name in self._kinds}
            for at in range(len(self.seen))
        ]

    def _draw(self, format: Format, count: int) -> None:
        """Run the batches in fp32 with random rounding, until there are ``count`` runs of each for a format."""
        draws = self._floors.setdefault(format.name, [])
        while len(draws) < count:
            found = []
            with self._runner.running(REFERENCE) as model:
                rounding = Rounding(model, format, self._runner.generator(len(draws)))
                for at, batch in enumerate(self.seen):
                    rounding.weights_()
                    found.append(self._against(at, self._runner.run(model, rounding.inputs(batch))))
            draws.append(found)

    def with_metrics(
        self, result: OutputParity, evaluate: Evaluate, left_s: float = math.inf
    ) -> OutputParity:
        """Return a result with the metrics of ``evaluate(model)``. It fails if one changes by more than rounding explains.

        If that would take longer than ``left_s`` seconds, the result has no metrics.
        """
        metrics = self._runner.metrics(result.plan, evaluate, self.line, left_s)
        result = dataclasses.replace(result, metrics=metrics)
        if not all(metric.explained for metric in metrics):
            result = dataclasses.replace(result, verdict="fail")
        elif result.verdict == "pass" and any(metric.unknown for metric in metrics):
            result = dataclasses.replace(result, verdict="undecided")
        return dataclasses.replace(result, reason=result.explained())

    def parts(self) -> tuple[Part, ...]:
        """Return the parts of the model for which a plan can choose a format."""
        if self._parts is None:
            model = copy_of(self._runner.model)
            with undisturbed():
                self._parts = find_parts(model, lambda: self._runner.call(model, self.seen[0]))
        return self._parts

    def blame(self, plan: Plan, parts: Sequence[Part] | None = None) -> list[tuple[str, float]]:
        """Return which parts of the model cause the error of a plan, from runs on one batch.

        Each part runs alone in the plan's format. If all these errors together are less than half of the plan's, an error needs
        several parts: one returns a low format, in which another computes. Then each part alone is kept in fp32.

        Returns:
            For each part its pattern, which is a module's path or a glob for modules at the same place in repeated blocks, and
            its share of the summed squared errors, or of what fp32 takes away from the error; the largest first. Outputs are
            weighted by their floor. A part with non-finite outputs has all of the error. The list is empty for a plan that
            computes in fp32.
        """
        every, format = self.parts(), format_of(plan)
        wanted = [part.pattern for part in (every if parts is None else parts)]
        if format.name not in LOW:
            return []
        low = dataclasses.replace(plan, compute=format.name)
        whole = self._weight(plan)
        found = {pattern: self._weight(only(low, every, [pattern])) for pattern in wanted}
        if any(map(math.isinf, found.values())):
            found = {pattern: float(math.isinf(value)) for pattern, value in found.items()}
        elif math.fsum(found.values()) < 0.5 * whole:
            kept = {pattern: self._weight(exempt(plan, every, [pattern])) for pattern in wanted}
            if math.isinf(whole):
                found = {pattern: float(not math.isinf(value)) for pattern, value in kept.items()}
            else:
                found = {pattern: max(0.0, whole - value) for pattern, value in kept.items()}
        total = math.fsum(found.values()) or 1.0
        return sorted(
            ((pattern, value / total) for pattern, value in found.items()), key=lambda each: -each[1]
        )

    def _weight(self, plan: Plan) -> float:
        """Return the sum over outputs of a plan's squared errors on the first batch, each as a multiple of the floor."""
        floor, found = self._floor(plan)[0], self._differences(plan, [0])[0]
        return math.fsum(_weight(kind, found[name], floor[name]) for name, kind in self._kinds.items())


def _weight(kind: Kind, alone: Difference, floor: Difference) -> float:
    """Return a squared error as a multiple of the floor, or changed integers."""
    if alone.nonfinite:
        return math.inf
    if kind == "integers" and alone.decisions:
        return alone.changed / alone.decisions
    return alone.error / floor.error if floor.error else alone.error / alone.signal if alone.signal else 0.0


def output_test(
    workload: Workload, model: nn.Module, device: torch.device, batches: Iterator[Any], seed: int
) -> OutputTest:
    """Return the test of a workload's outputs on the next ``OUTPUT_BATCHES`` batches, which have run in fp32."""
    call = functools.partial(outputs_of, workload)
    test = OutputTest(model, call, batches, device, seed=seed, call_name=f"tune({workload.name!r})")
    test.reference(OUTPUT_BATCHES)
    return test
