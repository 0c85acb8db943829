"""Make a recorded step again: bit for bit under its own plan, or under any other."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from castwise.casting import default_device_type
from castwise.casting.trees import to_device
from castwise.checkpoint.folder import candidates, read_manifest
from castwise.checkpoint.storage import need
from castwise.errors import CastwiseError, CheckpointError, StateError
from castwise.inspection.nonfinite import FirstNonfinite, first_nonfinite
from castwise.monitor import step_files
from castwise.monitor.moments import set_generators
from castwise.monitor.passes import Loss, Ran, run_step, threads, total
from castwise.numerics.isolation import copied, undisturbed, unspoilt
from castwise.parallel.wrappers import unwrap
from castwise.plans.plan import Plan, as_plan
from castwise.process import find_device
from castwise.ranks import ALONE
from castwise.workload import find_workload

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Record:
    """A step as it was recorded; see :class:`castwise.monitor.recorder.Recorder`.

    Attributes:
        path: Its folder.
        step: Which of those that the recorder saw.
        kind: ``overflow``, ``loss``, ``alarm`` or ``error``.
        reason: What was seen, in a clause.
        plan: That it ran under.
        device: Type of the device that it ran on.
        workload: By which name its job is found again; None where the recorder was told none.
        moments: Each microbatch's ``batch``, ``random`` states, and whether it was ``changed`` in place.
        losses: Each with its ``moment``, ``name`` and ``value``.
        nonfinite: Parameters whose gradients were not finite.
    """

    path: Path
    step: int
    kind: str
    reason: str
    plan: Plan
    device: str
    workload: str | None
    moments: list[dict[str, Any]] = field(repr=False)
    losses: list[dict[str, Any]] = field(repr=False)
    nonfinite: list[str] = field(repr=False)
    content: Mapping[str, Any] = field(repr=False)
    weights: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Record:
        """Read a record, or the newest of a folder of them, and check all of it.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        path = _newest(Path(folder))
        _, content, weights = step_files.read(path)
        try:
            _check(content)
            plan = Plan.from_json(content["plan"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"replay({str(path)!r}): it is damaged, or no record: {error}") from None
        own = {
            name: content[name]
            for name in ("step", "kind", "reason", "device", "workload", "moments", "losses")
        }
        return cls(
            path=path, plan=plan, nonfinite=content["nonfinite"], content=content, weights=weights, **own
        )

    def load_into(self, model: nn.Module) -> None:
        """Give a model, prepared or not, the weights, buffers and modes that the step began with.

        Raises:
            CheckpointError: It has other weights.
        """
        wanted = {
            key: tuple(value.shape) for key, value in model.state_dict().items() if isinstance(value, Tensor)
        }
        saved = {key: tuple(value.shape) for key, value in self.weights.items() if isinstance(value, Tensor)}
        if wanted != saved:
            other = sorted(key for key in wanted.keys() | saved.keys() if wanted.get(key) != saved.get(key))
            raise CheckpointError(
                f"replay({str(self.path)!r}): the {type(model).__name__} is another model than the recorded one: {len(other)} "
                f"weights differ in name or shape, such as {other[0]!r} ({saved.get(other[0])} recorded, {wanted.get(other[0])} "
                "here). Give the model that was trained, or the workload that makes it."
            )
        model.load_state_dict(dict(self.weights))
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                kept = self.content["buffers"].get(name)
                if isinstance(kept, Tensor) and kept.shape == buffer.shape:
                    buffer.copy_(kept)

    def set_modes(self, model: nn.Module) -> None:
        """Train and freeze what was trained and frozen."""
        training, frozen = set(self.content["training"]), set(self.content["frozen"])
        for name, module in model.named_modules():
            module.training = name in training
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(name not in frozen)


def _newest(folder: Path) -> Path:
    if (folder / "checkpoint.json").exists():
        return folder
    for _, path in candidates(folder):
        if isinstance(read_manifest(path), dict):
            return path
    raise CheckpointError(
        f"replay({str(folder)!r}): there is no complete record. Allowed: a folder that a Recorder wrote, or one of its records."
    )


def _check(content: Mapping[str, Any]) -> None:
    """See that what anybody may have written is of the types that are counted on.

    Raises:
        ValueError: It is not.
    """
    kinds: dict[str, Any] = {
        "kind": str, "reason": str, "step": int, "workload": (str, type(None)), "plan": str, "device": str, "threads": int,
        "world_size": int, "moments": list, "losses": list, "scales": dict, "buffers": dict, "training": list, "frozen": list,
        "nonfinite": list, "skipped": (bool, type(None)), "grad_norm": (Tensor, type(None)),
    }  # fmt: skip
    for name, kind in kinds.items():
        need(isinstance(content.get(name), kind), f"{name} is not of its kind")
    for moment in content["moments"]:
        good = isinstance(moment, dict) and moment.keys() == {"batch", "random", "changed"}
        need(good and isinstance(moment["random"], dict), "a moment is none")
    for loss in content["losses"]:
        good = isinstance(loss, dict) and loss.keys() == {"moment", "name", "value"}
        need(good and isinstance(loss["value"], Tensor) and loss["value"].numel() == 1, "a loss is none")
    need(
        all(isinstance(scale, Tensor) and scale.numel() == 1 for scale in content["scales"].values()),
        "a loss scale is none",
    )
    for name in ("training", "frozen", "nonfinite"):
        need(all(isinstance(text, str) for text in content[name]), f"{name} are no names")


@dataclass(frozen=True)
class Replay:
    """A step that was made again.

    Attributes:
        path: The record.
        step: Its number.
        reason: Why it was recorded.
        recorded_plan: The plan that it ran under.
        plan: The plan that it was made again under.
        recorded_losses: Each loss as it was, in its order.
        losses: Each as it is now.
        recorded_nonfinite: Parameters whose gradients were not finite.
        nonfinite: Those whose gradients are not finite now.
        exact: Whether losses are equal bit for bit and the same gradients are not finite; None under another plan or on another
            kind of device, where they need not be.
        notes: What stands in the way of an exact answer.
        first: The first operator that turned finite numbers into others, as :func:`castwise.first_nonfinite` found it; None
            where all is finite, or nobody asked.
        gradients: By name, as the backward left them: the loss scale is in them. Not in :meth:`to_dict`.
    """

    path: Path
    step: int
    reason: str
    recorded_plan: Plan
    plan: Plan
    recorded_losses: tuple[float, ...]
    losses: tuple[float, ...]
    recorded_nonfinite: tuple[str, ...]
    nonfinite: tuple[str, ...]
    exact: bool | None
    notes: tuple[str, ...] = ()
    first: FirstNonfinite | None = None
    gradients: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def finite(self) -> bool:
        """Whether losses and gradients are finite now."""
        return not self.nonfinite and all(map(math.isfinite, self.losses))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not finite is a string."""
        return {
            "kind": "replay",
            "version": 1,
            "path": str(self.path),
            "step": self.step,
            "reason": self.reason,
            "recorded_plan": str(self.recorded_plan),
            "plan": str(self.plan),
            "recorded_losses": [_plain(value) for value in self.recorded_losses],
            "losses": [_plain(value) for value in self.losses],
            "recorded_nonfinite": list(self.recorded_nonfinite),
            "nonfinite": list(self.nonfinite),
            "exact": self.exact,
            "finite": self.finite,
            "notes": list(self.notes),
            "first": None if self.first is None else self.first.to_dict(),
        }

    def table(self) -> RenderableType:
        """What was found, for ``rich.print``."""
        from castwise.report.show import table

        return table(self.to_dict())

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``replay.json`` into a folder, and what :attr:`first` writes beside it; returns the folder."""
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        (where / "replay.json").write_text(text + "\n", encoding="utf-8")
        if self.first is not None:
            self.first.save(where)
        return where


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def replay(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    loss: Loss | None = None,
    *,
    workload: str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    find: bool = True,
) -> Replay:
    """Make a recorded step again, on a copy of the model.

    Forward and backward of each microbatch run from the recorded weights, buffers, modes, random states and loss scale. On
    a CPU, with the torch and the number of threads of the recording, losses and gradients come out bit for bit.

    Args:
        folder: A record of a :class:`~castwise.monitor.recorder.Recorder`, or its folder, whose newest is taken.
        model: Built as the one that was trained, with any weights; prepared or not. Without one the workload's.
        loss: What the training does from a batch, as the loader hands it out, to the loss: ``loss(model, batch)``. Where there
            are several losses for a batch, they come as a mapping by name, or as a sequence of losses of one name.
        workload: Of which the model and the loss are, where none are given; by default that which was recorded.
        plan: To run under; by default the recorded one.
        device: To run on; by default the recorded kind.
        find: Where something is not finite, look for the operator that began it: :func:`castwise.first_nonfinite`.

    Returns:
        Losses and gradients, then and now.

    Raises:
        CheckpointError: No complete record there, or one of another model.
        StateError: Neither a model and a loss nor a workload.
        WorkloadError: A loss that is none.
    """
    record = Record.read(folder)
    if (model is None) != (loss is None):
        raise StateError("replay: give model and loss both, or neither and a workload")
    chosen = record.plan if plan is None else as_plan(plan)
    name = workload or record.workload
    if model is None or loss is None:
        if name is None:
            raise StateError(
                f"replay({str(record.path)!r}): the record names no workload; give model= and loss=, or workload="
            )
        found = find_workload(name)
        with undisturbed():
            model = found.model()
        loss = found.loss
    where = find_device("replay", device, record.device if record.device == "cpu" else default_device_type())
    inner = unwrap(model)
    with unspoilt(inner, "replay"), undisturbed(), threads(record.content["threads"]):
        ran = _run(record, copied(inner, "replay"), loss, chosen, where)
        same = chosen == record.plan and where.type == record.device
        recorded = [item["value"] for item in record.losses]
        exact = None
        if same:
            alone = record.content["world_size"] > 1  # there gradients were averaged over all
            exact = _equal(recorded, ran.losses) and (
                alone or sorted(ran.nonfinite) == sorted(record.nonfinite)
            )
        first = None
        if find and not ran.finite:
            first = _first(record, copied(inner, "replay"), loss, chosen, where)
    return Replay(
        path=record.path, step=record.step, reason=record.reason, recorded_plan=record.plan, plan=chosen,
        recorded_losses=tuple(map(float, recorded)), losses=tuple(map(float, ran.losses)),
        recorded_nonfinite=tuple(record.nonfinite), nonfinite=tuple(ran.nonfinite), exact=exact, notes=_notes(record),
        first=first, gradients=ran.gradients,
    )  # fmt: skip


def _notes(record: Record) -> tuple[str, ...]:
    manifest = read_manifest(record.path)
    was = manifest["torch"] if isinstance(manifest, dict) else torch.__version__
    notes = []
    if was != torch.__version__:
        notes.append(f"recorded by torch {was}, and this is {torch.__version__}")
    if any(moment["changed"] for moment in record.moments):
        notes.append("a batch was written to in place after the loader had handed it out")
    if record.content["world_size"] > 1:
        notes.append("of one of several processes: its gradients were averaged with those of the others")
    return tuple(notes)


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether losses are equal bit for bit; one NaN is as good as another."""
    return len(one) == len(other) and all(
        a.dtype is b.dtype and torch.equal(torch.nan_to_num(a, nan=-1.0), torch.nan_to_num(b, nan=-1.0))
        and torch.equal(a.isnan(), b.isnan())
        for a, b in zip((t.cpu().reshape(()) for t in one), (t.cpu().reshape(()) for t in other), strict=True)
    )  # fmt: skip


def _run(record: Record, model: nn.Module, loss: Loss, plan: Plan, device: torch.device) -> Ran:
    """Forward and backward of the step, as recorded."""
    record.set_modes(model)
    count = len(record.moments)
    names = [[item["name"] for item in record.losses if item["moment"] == at] for at in range(count)]
    try:
        return run_step(
            "replay", model, loss, plan, device, [(m["batch"], m["random"]) for m in record.moments], record.load_into,
            names=names, scales={name: float(scale) for name, scale in record.content["scales"].items()},
        )  # fmt: skip
    except ValueError as error:
        if isinstance(error, CastwiseError):
            raise
        raise CheckpointError(f"replay({str(record.path)!r}): it is damaged: {error}") from None


def _first(
    record: Record, model: nn.Module, loss: Loss, plan: Plan, device: torch.device
) -> FirstNonfinite | None:
    """Where it began, in the first microbatch that shows it; None where each is finite by itself."""
    model.to(device)
    record.load_into(model)
    record.set_modes(model)
    scale = record.content["scales"].get("loss")
    for moment in record.moments:
        set_generators(moment["random"])
        found = first_nonfinite(
            model, lambda m, b: total(loss(m, b)), to_device(moment["batch"], device), plan,
            device=device, loss_scale=None if plan.loss_scale is None or scale is None else float(scale), group=ALONE,
        )  # fmt: skip
        if found:
            return found
    return None
