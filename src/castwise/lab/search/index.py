"""Keep the results of searches in the user's cache folder, so that the next search for the same job can use them.

A job is identified by the settings of the search, the structure of its model and optimizer, and the shapes of its first batch. The
loss and the gradient norm on that batch tell whether weights, data and loss are about the same.

The stored result is the answer only if nothing is known to differ: loss and norm are equal to the last bit, in fp32 and in each low
format of the search, the first batches have the same bytes, and code, values that modules hold, device, threads and versions are
the same. Results in low formats see any code that acts only there, wherever it is: a cast more or less changes nothing in
fp32. Otherwise the stored plan is only tried first. That holds also for a plan that was found with less time or with fewer measurements than are now requested.

Only completed searches are kept. Files that cannot be read or written are ignored. The folder may be shared
(``CASTWISE_CACHE_DIR``), so files are also ignored if a user other than this user or root has written or could write them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import stat
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting.trees import cast_floating, map_tensors, tensors_in, to_device
from castwise.core.devices import in_fp64
from castwise.core.model.copying import copy_of
from castwise.core.plans.formats import FORMATS, LOW
from castwise.core.plans.plan import Plan
from castwise.core.plans.text import read_json
from castwise.lab.parity.probes import as_real
from castwise.lab.passes.isolation import seed_all, undisturbed
from castwise.lab.passes.observers import Operators, observed
from castwise.lab.search.code import code_digest, values_digest
from castwise.lab.search.context import Settings
from castwise.lab.search.evidence import Evidence
from castwise.lab.timing.environment import environment
from castwise.lab.timing.runners import build_model, served
from castwise.lab.workloads.workload import Workload

ALIKE = 0.01
"""A stored plan is tried first if the two losses, and the two norms, differ by no more than this share."""
BATCHES, MOST_BATCHES, MOST_BYTES = 8, 32, 1 << 28
"""Number of batches whose bytes must be the same: up to ``MOST_BATCHES`` in ``MOST_BYTES``, but at least ``BATCHES``."""
_FREE = ("budget_s", "memory", "verify_seeds", "seed")
"""Settings that change how well a plan is known, but not which plan the search looks for."""
_LARGEST = 1 << 26
_DEEPEST = 200
"""Limits of an entry: its size in bytes, and the depth of its JSON. Larger files were not written by castwise."""
_HEAP = re.compile("MALLOC_|GLIBC_TUNABLES$|LD_PRELOAD$")
"""Environment variables that decide where host tensors are allocated, and thus whether each step meets page faults."""
_SAID = (
    "Found on {date} for the same model, optimizer, loss, data and code, on the same device and with the same versions; nothing was "
    "measured again. --fresh, or tune(fresh=True), searches anew."
)


@dataclass(frozen=True)
class Job:
    """The values by which a later search recognises the same tuning job.

    Attributes:
        digest: Digest of the settings and of the structures of model, optimizer and batch.
        loss: Loss on the first batch in fp32.
        norm: Norm of the gradient of that loss.
        code: Digest of the code of model, loss, optimizer and batches, of the values that modules hold, and of the operators
            of a forward. They may change the speed of a step, or its results in another format, and not this loss.
        data: Digest of the bytes of the first batches.
        low: Digest of losses and norms of the gradients on the first batch in each low format of the search, by autocast and with
            everything low.
    """

    digest: str
    loss: float
    norm: float
    code: str
    data: str
    low: str

    def is_same(self, other: Mapping[str, Any]) -> bool:
        """Whether another job is this job, as far as one pass in fp32, the code and the data tell."""
        return bool(dataclasses.asdict(self) == other)

    def is_like(self, other: Mapping[str, float]) -> bool:
        """Whether another job's loss and norm equal this job's up to rounding."""
        return all(
            math.isclose(mine, other[name], rel_tol=ALIKE)
            for name, mine in (("loss", self.loss), ("norm", self.norm))
        )


def job_of(workload: Workload, device: torch.device, settings: Settings) -> Job | None:
    """Identify a job by one forward and backward pass; None if that fails, because the search then reports the failure."""
    try:
        with undisturbed():
            model = build_model(workload, device, settings.seed)
            if settings.goal == "inference":
                return _job_of_inference(workload, model.eval(), device, settings)
            optimizer = workload.optimizer(model.parameters())
            batch = next(iter(workload.batches(settings.seed)))
            batch = to_device(batch, device)
            seed_all(settings.seed)
            with observed(model, seen := Operators()):
                loss = workload.loss(model, batch)
            loss.backward()
            norm = _norm([p.grad for p in model.parameters() if p.grad is not None])
            said = [_settings(settings), _structure(model), _optimizer(optimizer), _shapes(batch)]
            functions = (workload.model, workload.loss, workload.optimizer, type(optimizer), workload.batches)
            code = _digest(repr([code_digest(model, functions), [*map(str, seen.ran)]]))
            data = _data(workload, settings.seed)
            low = _low(
                workload,
                model,
                device,
                settings,
                lambda m, b: _loss_and_norm(workload, m, to_device(b, device)),
            )
            return Job(_digest_without_addresses(said), float(loss.detach()), norm, code, data, low)
    except (Exception, SystemExit):
        return None


def _job_of_inference(workload: Workload, model: nn.Module, device: torch.device, settings: Settings) -> Job:
    """Identify a job without training by the norms of a batch's outputs and of the weights."""
    batch = to_device(next(iter(workload.batches(settings.seed))), device)
    seed_all(settings.seed)
    call = served(workload, model, batch)
    with torch.inference_mode(), observed(model, seen := Operators()):
        outputs = tensors_in(call())
    norms = [_norm(some) for some in (outputs, [p.detach() for p in model.parameters()])]
    functions = (workload.model, workload.loss, workload.outputs, workload.batches)
    code = _digest(repr([code_digest(model, functions), [*map(str, seen.ran)]]))
    said = [_settings(settings), _structure(model), _shapes(batch)]
    low = _low(workload, model, device, settings, lambda m, b: _outputs(workload, m, to_device(b, device)))
    data = _data(workload, settings.seed)
    return Job(_digest_without_addresses(said), norms[0], norms[1], code, data, low)


def _low(
    workload: Workload,
    model: nn.Module,
    device: torch.device,
    settings: Settings,
    run: Callable[[nn.Module, Any], list[float]],
) -> str:
    """Return a digest of the results on a batch in each low format of a search, by autocast and with everything low."""
    found: list[Any] = []
    first = next(iter(workload.batches(settings.seed)))
    for name in sorted(set(settings.formats) & set(LOW)):
        dtype = FORMATS[name].dtype
        for stores in (False, True):
            copied, batch = copy_of(model), first
            if stores:
                copied, batch = copied.to(dtype), cast_floating(batch, dtype)
            seed_all(settings.seed)
            try:
                with torch.autocast(device.type, dtype, enabled=not stores):
                    found.append((name, stores, run(copied, batch)))
            except Exception as error:  # the search reports what the format cannot run
                found.append((name, stores, type(error).__name__))
    return _digest(repr(found))


def _loss_and_norm(workload: Workload, model: nn.Module, batch: Any) -> list[float]:
    model.zero_grad()
    loss = workload.loss(model, batch)
    loss.backward()
    return [float(loss.detach()), _norm([p.grad for p in model.parameters() if p.grad is not None])]


@torch.inference_mode()
def _outputs(workload: Workload, model: nn.Module, batch: Any) -> list[float]:
    return [_norm([output]) for output in tensors_in(served(workload, model, batch)())]


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the norm of tensors together, in fp64."""
    dense = [_torch.tensors.dense_values(t.coalesce() if t.is_sparse else t) for t in tensors]
    return math.sqrt(sum(float(in_fp64(as_real(tensor)).square().sum()) for tensor in dense))


def _digest_without_addresses(said: Any) -> str:
    return _digest(re.sub(r" at 0x[0-9a-f]+", "", repr(said)))


def _data(workload: Workload, seed: int) -> str:
    """Return a digest of the bytes and values of the first batches."""
    digest, held = hashlib.sha256(), 0
    for number, batch in enumerate(itertools.islice(workload.batches(seed), MOST_BATCHES)):
        if number >= BATCHES and held > MOST_BYTES:
            break
        digest.update(values_digest(batch).encode())
        for tensor in tensors_in(batch):
            dense = _torch.tensors.dense_values(tensor.detach().cpu()).contiguous()
            digest.update(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
            held += dense.nbytes
    return digest.hexdigest()[:16]


def _digest(said: str) -> str:
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _settings(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(settings).items() if name not in _FREE}


def _structure(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [repr(model), [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]]


def _optimizer(optimizer: torch.optim.Optimizer) -> list[Any]:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [type(optimizer).__qualname__, [sorted(map(repr, group.items())) for group in groups]]


def _shapes(batch: Any) -> str:
    def shape(tensor: Tensor) -> Any:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return repr(map_tensors(shape, batch))


def folder() -> Path | None:
    """Return the cache folder; None if ``CASTWISE_CACHE_DIR`` is empty.

    It lies in the folder that this variable names. If the variable is not set, it lies in ``castwise`` in the user's cache
    folder.
    """
    chosen = os.environ.get("CASTWISE_CACHE_DIR")
    if chosen == "":
        return None
    return Path(chosen or _users_cache()) / "plans"


def _users_cache() -> Path:
    """Return ``castwise`` in the system's folder for files that programs can recreate."""
    home = Path.home()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "castwise" / "Cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "castwise"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "castwise"


def _place(device: torch.device) -> dict[str, Any]:
    """Return everything besides the job that changes a plan's speed or gradients, such as device, threads and versions."""
    now = dataclasses.asdict(environment(device))
    place = {key: value for key, value in now.items() if key not in ("command", "date")}
    if device.type == "cpu" and (
        heap := {key: os.environ[key] for key in sorted(os.environ) if _HEAP.match(key)}
    ):
        place["heap"] = _digest(repr(heap))
    return place


def keep(job: Job, device: torch.device, plan: Plan, record: Mapping[str, Any]) -> None:
    """Store the result of a search: the chosen plan, and the search's evidence as JSON types."""
    where, place = folder(), _place(device)
    if where is None:
        return
    path = where / f"{job.digest}-{_digest(repr(sorted(place.items())))}.json"
    found = [plan.to_json(), record]
    entry = {"job": dataclasses.asdict(job), "place": place, "found": found, "seal": _seal(found)}
    with contextlib.suppress(OSError):  # if this fails, the next search only takes as long as this one
        where.parent.mkdir(parents=True, exist_ok=True)
        where.mkdir(mode=0o700, exist_ok=True)
        if where.stat().st_uid == getattr(os, "getuid", int)():
            where.chmod(0o700)  # an earlier castwise created the folder with the umask's permissions
        if not _is_ours(where.stat()):
            return
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.unlink(missing_ok=True)
        handle = os.open(
            partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
        )  # O_EXCL does not follow another user's link
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entry, file)
        partial.replace(path)


def _is_ours(about: os.stat_result) -> bool:
    """Whether only this user and root can have written a file or folder; on Windows, users' folders are always private."""
    if os.name == "nt":
        return True
    return about.st_uid in (os.getuid(), 0) and not stat.S_IMODE(about.st_mode) & (
        stat.S_IWGRP | stat.S_IWOTH
    )


def _read(path: Path) -> str:
    """Read a plain file that belongs to this user or root and that no other user can write.

    Raises:
        OSError: The path is a link or any other kind of file.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, encoding="utf-8") as file:
        about = os.fstat(handle)  # checks the opened file itself
        if not stat.S_ISREG(about.st_mode) or not _is_ours(about) or about.st_size > _LARGEST:
            raise OSError("not a plain file of this user's")
        return file.read()


def _seal(found: Any) -> str:
    """Return a digest of an entry's JSON, so that a result is not used if someone has edited it."""
    return _digest(json.dumps(found, sort_keys=True))


def find(
    job: Job, device: torch.device, settings: Settings
) -> tuple[tuple[Plan, Evidence] | None, list[Plan]]:
    """Find stored results for a job.

    Returns:
        The stored answer to the current request, if there is one, and stored plans for a new search to try first.
    """
    here: tuple[Plan, Evidence] | None = None
    elsewhere: list[Plan] = []
    where, place = folder(), _place(device)
    with contextlib.suppress(OSError):
        where = None if where is None or not _is_ours(where.stat()) else where
    for path in sorted(where.glob(f"{job.digest}-*.json")) if where is not None else ():
        with contextlib.suppress(Exception):  # from another version, truncated or edited: ignore the file
            entry = read_json(_read(path), deepest=_DEEPEST)
            if not job.is_like(entry["job"]) or _seal(entry["found"]) != entry["seal"]:
                continue
            plan = Plan.from_json(entry["found"][0])
            if entry["place"] == place and job.is_same(entry["job"]):
                found = restored(Evidence, entry["found"][1])
                if _answers(found, settings):
                    said = _SAID.format(date=found.environment.date[:10])
                    here = (plan, dataclasses.replace(found, notes=(said, *found.notes)))
                    continue
            elsewhere.append(dataclasses.replace(plan, provenance=None))
    return here, elsewhere


def _answers(found: Evidence, settings: Settings) -> bool:
    """Whether a stored search answers everything that a search with ``settings`` would.

    The settings of the two searches differ only in ``_FREE``.
    """
    asked = found.settings
    if settings.verify_steps and settings.verify_seeds > asked["verify_seeds"]:
        return False
    timed = settings.memory and settings.goal in ("time", "inference")
    if timed and not asked["memory"]:
        return False
    if settings.budget_s <= asked["budget_s"]:
        return True
    if found.undecided or any(row.late for row in found.candidates):
        return False
    return not timed or any(row.peak_bytes is not None for row in found.candidates)


def restored(kind: Any, value: Any) -> Any:
    """Rebuild dataclasses from JSON types by the declared types of their fields. Null becomes infinity for a float."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        known = [field.name for field in dataclasses.fields(kind) if field.init and field.name in value]
        return kind(**{name: restored(hints[name], value[name]) for name in known})  # type: ignore[operator]
    if origin in (typing.Union, types.UnionType):
        some = next(one for one in inner if one is not type(None))
        return None if value is None else restored(some, value)
    if origin is tuple:
        return tuple(restored(inner[0], item) for item in value)
    if kind is float and value is None:
        return math.inf
    return value
