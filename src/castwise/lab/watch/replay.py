"""Run a recorded step again: bit for bit under its own plan, or under another plan."""

from __future__ import annotations

import math
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from castwise.core.casting import default_device_type
from castwise.core.casting.trees import to_device
from castwise.core.checkpoint.folder import candidates, read_manifest
from castwise.core.checkpoint.storage import need
from castwise.core.files import write_whole
from castwise.core.parallel.wrappers import unwrap
from castwise.core.plans.formats import LOW_DTYPES
from castwise.core.plans.plan import Plan, as_plan
from castwise.core.plans.text import shown, some
from castwise.core.plans.words import in_words
from castwise.core.ranks import ALONE
from castwise.core.scaler.gradients import values
from castwise.core.session.process import find_device
from castwise.errors import CastwiseError, CheckpointError, PlanError, StateError
from castwise.lab.inspect.nonfinite import FirstNonfinite, first_nonfinite
from castwise.lab.passes.isolation import copied, undisturbed, unspoilt
from castwise.lab.result import Result
from castwise.lab.watch import step_files
from castwise.lab.watch.moments import set_generators
from castwise.lab.watch.passes import Loss, Ran, run_step, threads, total
from castwise.lab.workloads.workload import find_workload


@dataclass(frozen=True)
class Record:
    """The part of a recorded step that one rank wrote; see :class:`castwise.lab.watch.recorder.Recorder`.

    Attributes:
        path: Folder of the record.
        rank: The rank that wrote this part.
        world_size: Number of ranks that made the step.
        step: Number of the step, counted by the recorder.
        kind: ``overflow``, ``loss``, ``alarm`` or ``error``.
        reason: Why the step was recorded, in a clause.
        plan: The plan of the recorded run.
        device: Device type of the recorded run.
        workload: Name of the job, as the recorder was given it; None if it was given none.
        moments: For each microbatch, its ``batch``, its ``random`` states, and whether it was ``changed`` in place.
        losses: For each loss, the index of its microbatch (``moment``), its ``name`` and its ``value``.
        nonfinite: Names of parameters whose gradients were not finite.
    """

    path: Path
    rank: int
    world_size: int
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
    def read(cls, folder: str | os.PathLike[str]) -> list[Record]:
        """Read and check a record, or the newest record in a folder. Return one part for each rank that wrote it.

        Raises:
            CheckpointError: There is no record, or it is damaged.
        """
        path = _newest(Path(folder))
        _, contents, weights = step_files.read(path)
        try:
            for content in contents:
                _check(content)
            plans = [Plan.from_json(content["plan"]) for content in contents]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"replay({str(path)!r}): the record is damaged, or this is not a record: {error}"
            ) from None
        parts = []
        for content, plan in zip(contents, plans, strict=True):
            if content["shared_buffers"]:
                content["buffers"] = contents[0]["buffers"]
            own = {name: content[name] for name in _OF_A_RECORD}
            parts.append(cls(path=path, plan=plan, content=content, weights=weights, **own))
        return parts

    def load_into(self, model: nn.Module) -> None:
        """Load the weights, the buffers and the training modes from before the step into a model, prepared or not.

        Raises:
            CheckpointError: The model has other weights.
        """
        wanted = {
            key: tuple(value.shape) for key, value in model.state_dict().items() if isinstance(value, Tensor)
        }
        saved = {key: tuple(value.shape) for key, value in self.weights.items() if isinstance(value, Tensor)}
        if wanted != saved:
            other = sorted(key for key in wanted.keys() | saved.keys() if wanted.get(key) != saved.get(key))
            raise CheckpointError(
                f"replay({str(self.path)!r}): the {type(model).__name__} differs from the recorded model: {len(other)} "
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
        """Restore the modules' training modes and the parameters' ``requires_grad``."""
        training, frozen = set(self.content["training"]), set(self.content["frozen"])
        for name, module in model.named_modules():
            module.training = name in training
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(name not in frozen)


_OF_A_RECORD = (
    "rank", "world_size", "step", "kind", "reason", "device", "workload", "moments", "losses", "nonfinite",
)  # fmt: skip


def _newest(folder: Path) -> Path:
    if (folder / "checkpoint.json").exists():
        return folder
    passed: list[str] = []
    for _, path in candidates(folder):
        found = read_manifest(path)
        if isinstance(found, dict):
            if passed:
                warnings.warn(f"replay({str(folder)!r}): skipped {some(passed, 3)}", stacklevel=4)
            return path
        passed.append(f"{path.name}, which {found}")
    why = f" Skipped: {some(passed, 3)}." if passed else ""
    raise CheckpointError(
        f"replay({str(folder)!r}): there is no complete record.{why} Allowed: a folder that a Recorder wrote, or one of its records."
    )


def _check(content: Mapping[str, Any]) -> None:
    """Check the types of all values that were read from a record: records may come from anyone.

    Raises:
        ValueError: A type is wrong.
    """
    kinds: dict[str, Any] = {
        "kind": str, "reason": str, "step": int, "workload": (str, type(None)), "plan": str, "device": str, "threads": int,
        "world_size": int, "moments": list, "losses": list, "scales": dict, "buffers": dict, "training": list, "frozen": list,
        "nonfinite": list, "skipped": (bool, type(None)), "grad_norm": (Tensor, type(None)), "rank": int,
        "shared_buffers": bool,
    }  # fmt: skip
    for name, kind in kinds.items():
        need(isinstance(content.get(name), kind), f"{name} has the wrong type")
    for moment in content["moments"]:
        good = isinstance(moment, dict) and moment.keys() == {"batch", "random", "changed"}
        need(
            good and isinstance(moment["random"], dict),
            "the entry of a microbatch is not valid",
        )
    for loss in content["losses"]:
        good = isinstance(loss, dict) and loss.keys() == {"moment", "name", "value"}
        need(
            good and isinstance(loss["value"], Tensor) and loss["value"].numel() == 1,
            "a loss is not a number",
        )
    need(
        all(isinstance(scale, Tensor) and scale.numel() == 1 for scale in content["scales"].values()),
        "a loss scale is not a number",
    )
    for name in ("training", "frozen", "nonfinite"):
        need(all(isinstance(text, str) for text in content[name]), f"an entry of {name} is not a string")


@dataclass(frozen=True)
class Replay(Result):
    """The result of :func:`castwise.replay`, which runs a recorded training step again.

    Attributes:
        path: The folder of the record.
        step: The number of the recorded step.
        reason: The reason why the step was recorded.
        recorded_plan: The plan of the recorded run. A plan decides the formats in which a model computes and stores
            its weights.
        plan: The plan of this run.
        recorded_losses: The recorded losses, in order. In :meth:`to_dict` a loss that is not finite is text, such as
            ``nan``.
        losses: The losses of this run, in the same order. Non-finite losses are text in :meth:`to_dict`.
        recorded_nonfinite: The names of the parameters that had non-finite gradients in the recorded run.
        nonfinite: The names of the parameters that have non-finite gradients in this run.
        exact: Whether all losses are bit-identical and the same gradients are not finite. It is None under another
            plan or on another kind of device, where they may differ.
        notes: The obstacles to an exact result, in sentences.
        first: The first operator that turned finite inputs into a non-finite output, as found by
            :func:`castwise.first_nonfinite`. It is None if everything is finite, or if ``find`` was False.
        world_size: The number of ranks that made the recorded step.
        ranks: The rank of each recorded loss.
        gradients: The gradients by parameter name, as backward left them, so they are multiplied by the loss scale.
            With several ranks, they are the mean over the ranks. :meth:`to_dict` leaves them out.
    """

    kind: ClassVar[str] = "replay"

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
    world_size: int = 1
    ranks: tuple[int, ...] = ()
    gradients: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def finite(self) -> bool:
        """Whether all losses and gradients of this run are finite."""
        return not self.nonfinite and all(map(math.isfinite, self.losses))

    def _fields(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "gradients"}
        return own | {
            "path": str(self.path),
            "recorded_plan": str(self.recorded_plan),
            "recorded_words": in_words(self.recorded_plan),
            "plan": str(self.plan),
            "words": in_words(self.plan),
            "recorded_losses": [_plain(value) for value in self.recorded_losses],
            "losses": [_plain(value) for value in self.losses],
            "finite": self.finite,
            "first": None if self.first is None else self.first.to_dict(),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``replay.json`` and the files of :attr:`first` into a folder, and return the folder.

        Args:
            folder: The output folder, which is created if it does not exist.
        """
        self.write(Path(folder))
        return Path(folder)

    def write(self, folder: Path) -> list[Path]:
        """Write the same files as :meth:`save` into a folder, and return their paths.

        Args:
            folder: The output folder, which is created if it does not exist.
        """
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / "replay.json"]
        write_whole(written[0], self.to_json() + "\n")
        if self.first is not None:
            page = self.first.save(folder)
            written += dict.fromkeys([page, folder / "nonfinite.json"])
        return written


def _plain(value: float) -> float | str:
    """Return a loss for JSON. A non-finite loss becomes a string, because NaN and infinities must stay distinct."""
    return value if math.isfinite(value) else str(value)


def replay(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    loss: Loss | None = None,
    *,
    workload: str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    rank: int | None = None,
    find: bool = True,
) -> Replay:
    """Run a recorded training step again, on a copy of the model.

    A :class:`castwise.Recorder` records steps that go wrong. Use this to find out why such a step went wrong, or
    whether it goes well under another plan. A plan decides the formats in which a model computes and stores its
    weights.

    Forward and backward of each microbatch start from the recorded weights, buffers, training modes, random states
    and loss scale. The losses and gradients are bit-identical to the recorded ones on a CPU with the same torch
    version and number of threads.

    If several ranks made the step, replicated or sharded by FSDP2, this one process runs the whole model for each of
    them. The microbatches of each rank start from the common initial weights, and their gradients are then averaged.
    Under tensor parallelism, the ranks had added numbers in another order. The result is then only close, and it
    differs if there is dropout between sharded layers.

    Args:
        folder: A record of a :class:`castwise.Recorder`, or a folder of records, of which the newest is used.
        model: A model with the structure of the recorded model, prepared or not. Its weights do not matter. By
            default it is the model of the workload.
        loss: A function ``loss(model, batch)`` that returns the training's loss of a batch as the loader yields it.
            If a batch has several losses, the function returns a mapping from their names to them, or a sequence of
            losses that share a name. By default it is the loss of the workload.
        workload: The name of the workload that provides ``model`` and ``loss`` if they are not given. A workload is
            code that is run, and the record may come from another user. Therefore a name that only the record
            contains is never imported.
        plan: The plan to run under. By default it is the recorded plan.
        device: The device to run on. By default it is a device of the recorded kind.
        rank: The rank whose part of the step is run. By default the parts of all ranks are run, one after the other.
        find: Whether to find the first operator with a non-finite output, as :func:`castwise.first_nonfinite` does,
            if a loss or gradient is not finite.

    Returns:
        The losses and gradients of the recorded run and of this run.

    Raises:
        CheckpointError: No complete record was found, or the record was made with another model.
        StateError: Neither ``model`` and ``loss`` nor ``workload`` is given. The message names the recorded workload.
        WorkloadError: The loss is invalid.
        PlanError: The given rank did not write the record.
    """
    records = Record.read(folder)
    record = records[0]
    if rank is not None:
        allowed = [one.rank for one in records]
        records = [one for one in records if one.rank == rank]
        if not records:
            raise PlanError(
                f"replay(rank={rank!r}): {str(record.path)!r} has no such rank; allowed: {', '.join(map(str, allowed))}"
            )
    if (model is None) != (loss is None):
        raise StateError("replay: give both model= and loss=, or only workload=")
    chosen = record.plan if plan is None else as_plan(plan)
    if model is None or loss is None:
        if workload is None:
            raise StateError(_without_code(record, folder, plan=plan, device=device, rank=rank))
        found = find_workload(workload)
        with undisturbed():
            model = found.model()
        loss = found.loss
    where = find_device("replay", device, record.device if record.device == "cpu" else default_device_type())
    inner = unwrap(model)
    runs: list[Ran] = []
    gradients: dict[str, Tensor] = {}
    formats: dict[str, torch.dtype] = {}
    first, notes = None, _notes(records)
    with unspoilt(inner, "replay"), undisturbed():
        for one in records:
            with threads(one.content["threads"]):
                ran = _run(one, copied(inner, "replay"), loss, chosen, where)
                _add(gradients, ran.gradients, len(records))
                formats |= {name: gradient.dtype for name, gradient in ran.gradients.items()}
                runs.append(replace(ran, gradients={}))
                if find and first is None and not ran.finite:
                    first = _first(one, copied(inner, "replay"), loss, chosen, where)
                    if first is not None and record.world_size > 1:
                        notes.append(f"the first non-finite operator ran on rank {one.rank}")
        gradients = {name: gradient.to(formats[name]) for name, gradient in gradients.items()}
        nonfinite = [name for name, grad in gradients.items() if not bool(torch.isfinite(values(grad)).all())]
    recorded = [[item["value"] for item in one.losses] for one in records]
    was_nonfinite = list(dict.fromkeys(name for one in records for name in one.nonfinite))
    exact = None
    if chosen == record.plan and where.type == record.device:
        exact = all(_equal(then, ran.losses) for then, ran in zip(recorded, runs, strict=True))
        if len(records) == record.world_size:  # else the recorded gradients include other ranks'
            exact = exact and sorted(nonfinite) == sorted(was_nonfinite)
    return Replay(
        path=record.path, step=record.step, reason=record.reason, recorded_plan=record.plan, plan=chosen,
        recorded_losses=tuple(float(value) for then in recorded for value in then),
        losses=tuple(float(value) for ran in runs for value in ran.losses),
        recorded_nonfinite=tuple(was_nonfinite), nonfinite=tuple(nonfinite), exact=exact, notes=tuple(notes), first=first,
        world_size=record.world_size,
        ranks=tuple(one.rank for one, then in zip(records, recorded, strict=True) for _ in then), gradients=gradients,
    )  # fmt: skip


def _without_code(record: Record, folder: str | os.PathLike[str], **options: object) -> str:
    """Return the error message if no code was given. It names the recorded workload and the command to type."""
    call = f"replay({str(record.path)!r})"
    if record.workload is None:
        return f"{call}: the record names no workload; give model= and loss=, or workload= (--workload)"
    # A record may come from anyone: its text is escaped for the terminal and the shell.
    known = record.workload if record.workload.isprintable() and len(record.workload) < 200 else "WORKLOAD"
    given = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
    words = [
        "castwise",
        "replay",
        os.fspath(folder),
        "--workload",
        known,
        *(word for pair in given for word in pair),
    ]
    return (
        f"{call}: recorded with workload {shown(record.workload)}. A workload is code, and runs only if you name it; to "
        f"do so, type: {shlex.join(words)} (in Python: workload={shown(record.workload)})"
    )


def _add(total: dict[str, Tensor], gradients: Mapping[str, Tensor], ranks: int) -> None:
    """Add one rank's gradients to the mean over ranks. As in FSDP2, gradients in low formats are summed in fp32."""
    for name, gradient in gradients.items():
        wide = gradient.float() if gradient.dtype in LOW_DTYPES else gradient
        share = wide / ranks if ranks > 1 else gradient
        total[name] = total[name] + share if name in total else share


def _notes(records: Sequence[Record]) -> list[str]:
    record = records[0]
    manifest = read_manifest(record.path)
    was = manifest["torch"] if isinstance(manifest, dict) else torch.__version__
    notes = []
    if was != torch.__version__:
        notes.append(f"recorded with torch {was}, replayed with torch {torch.__version__}")
    if any(moment["changed"] for one in records for moment in one.moments):
        notes.append("a batch was changed in place after the loader had returned it")
    if any(one.content.get("moved") is True for one in records):
        notes.append(
            "an earlier optimizer step on the same batch had changed the weights before they were recorded"
        )
    if len(records) < record.world_size:
        notes.append(
            f"the recorded gradients are means over {record.world_size} ranks, of which {len(records)} "
            f"{'was' if len(records) == 1 else 'were'} replayed"
        )
    return notes


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether losses are bit-identical. NaNs count as equal."""
    return len(one) == len(other) and all(
        a.dtype is b.dtype and torch.equal(torch.nan_to_num(a, nan=-1.0), torch.nan_to_num(b, nan=-1.0))
        and torch.equal(a.isnan(), b.isnan())
        for a, b in zip((t.cpu().reshape(()) for t in one), (t.cpu().reshape(()) for t in other), strict=True)
    )  # fmt: skip


def _run(record: Record, model: nn.Module, loss: Loss, plan: Plan, device: torch.device) -> Ran:
    """Run forward and backward of the recorded step."""
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
        raise CheckpointError(f"replay({str(record.path)!r}): the record is damaged: {error}") from None


def _first(
    record: Record, model: nn.Module, loss: Loss, plan: Plan, device: torch.device
) -> FirstNonfinite | None:
    """Find the first operator with a non-finite output. The microbatches are searched one by one.

    Return None if every microbatch is finite when it runs alone.
    """
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
