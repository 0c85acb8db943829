"""Define workloads: a model, its loss, its optimizer and its batches under one name, so that a command can run them.

A workload is named as a built-in with options (``sine?size=128``), as ``path/to/file.py:attribute`` or as
``package.module:attribute``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core.plans.text import close_matches, is_encodable
from castwise.errors import CastwiseError, NonFiniteError, WorkloadError, place, told

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = [
    "BUILT_IN", "Pipeline", "Workload", "about_data", "check_loss", "check_no_backward", "find_workload", "make_optimizer",
    "next_batch", "non_finite_parts", "users_code",
]  # fmt: skip

BUILT_IN: Mapping[str, str] = {
    "sine": "castwise.lab.workloads.sine",
    "gpt": "castwise.lab.workloads.gpt",
    "digits": "castwise.lab.workloads.digits",
}
"""The module of each built-in workload. The function of the same name in it makes the workload; its parameters are the
options."""


def no_optimizer(params: Iterable[nn.Parameter]) -> Optimizer:
    """Raise, because the workload is only for inference."""
    raise WorkloadError(
        "this workload has no optimizer, so only its inference can be measured: castwise.bench(..., training=False) and "
        "castwise.tune(..., goal='inference'); pass optimizer= to train it"
    )


def no_loss(model: nn.Module, batch: Any) -> Tensor:
    """Raise, because the workload is only for inference."""
    raise WorkloadError(
        "this workload has no loss, so only its inference can be measured: castwise.bench(..., training=False) and "
        "castwise.tune(..., goal='inference'); pass loss= to train it"
    )


def no_batches(seed: int) -> Iterator[Any]:
    """Stand for batches that are missing. :class:`Workload` raises an error for it."""
    raise NotImplementedError


@dataclass(frozen=True)
class Pipeline:
    """The functions that split a workload's model into pipeline stages and compute its loss.

    Attributes:
        split: A function ``split(model, stages)`` that returns as many modules as ``stages``. The first module takes
            the inputs. Each other module takes the output of the module before it. Together they have all of the
            model's modules, under the model's own state-dict keys. A parameter may be in several of them, such as
            tied embeddings.
        inputs: A function ``inputs(batch)`` that returns the arguments of the first stage.
        target: A function ``target(batch)`` that returns the target of the loss.
        loss: A function ``loss(output, target)`` that returns a floating tensor with one element. It is the mean over
            the batch, computed from the output of the last stage. It is called for each microbatch, so BatchNorm
            normalises each microbatch by itself.
    """

    split: Callable[[nn.Module, int], Sequence[nn.Module]]
    inputs: Callable[[Any], tuple[Any, ...]]
    target: Callable[[Any], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            if not callable(getattr(self, name)):
                raise WorkloadError(
                    f"Pipeline: {name} must be a function, got {type(getattr(self, name)).__name__}"
                )


@dataclass(frozen=True)
class Workload:
    """A training job: the functions that make a model, an optimizer, batches and a loss.

    Describe your own training with it, so that :func:`castwise.tune`, :func:`castwise.bench` and the commands of
    ``castwise`` can run it.

    ::

        job = castwise.Workload(
            "job",
            model=lambda: Net(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
            batches=make_batches,
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        )

    A workload that is only served needs no optimizer and no loss: ``tune(goal="inference")`` and ``bench`` call its model
    as ``outputs`` says.

    Attributes:
        name: A short name, for tables and file names.
        model: A function that makes the model on the CPU, with weights drawn from torch's global generator.
        optimizer: A function ``optimizer(params)`` that makes the optimizer from the model's parameters.
        batches: A function ``batches(seed)`` that returns an endless iterator of batches. A batch has tensors on the
            CPU, in tuples, lists or mappings. The same seed gives the same batches.
        loss: A function ``loss(model, batch)`` that returns a floating tensor with one element. The batch is on the
            model's device.
        outputs: A function ``outputs(model, batch)`` that returns the model's outputs for a batch when it is served:
            tensors, or tuples, lists, mappings or dataclasses of tensors. By default the model is called as the loss
            calls it, or, without a loss, as ``model(batch)``, ``model(*batch)`` for a tuple or list and
            ``model(**batch)`` for a mapping.
        evaluate: A function ``evaluate(model)`` that returns metrics by name. The trained model is in evaluation
            mode, and gradients are off.
        description: One sentence about the job.
        picture: A function ``picture(model)`` that returns two images of the trained model by name, ``target`` and
            ``prediction``, each of shape ``[height, width]``.
        shards: A function ``shards(model)`` that returns the model's tensor-parallel split. It maps module paths to
            parallel styles, as for ``parallelize_module``.
        blocks: A function ``blocks(model)`` that returns the modules that FSDP2 shards individually. By default these
            are the members of each ``ModuleList`` and ``Sequential``. The remaining parameters are sharded with the
            model itself.
        pipeline: The model's split into pipeline stages, a :class:`castwise.workload.Pipeline`.
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = field(default_factory=lambda: no_optimizer)
    batches: Callable[[int], Iterator[Any]] = field(default_factory=lambda: no_batches)
    loss: Callable[[nn.Module, Any], Tensor] = field(default_factory=lambda: no_loss)
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    description: str = ""
    picture: Callable[[nn.Module], Mapping[str, Tensor]] | None = None
    shards: Callable[[nn.Module], Mapping[str, ParallelStyle]] | None = field(default=None, kw_only=True)
    blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = field(default=None, kw_only=True)
    pipeline: Pipeline | None = field(default=None, kw_only=True)
    outputs: Callable[[nn.Module, Any], Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise WorkloadError(f"Workload(name={self.name!r}): needs a name, a string that is not empty")
        optional = ("evaluate", "picture", "shards", "blocks", "outputs")
        if self.batches is no_batches:
            raise WorkloadError(
                f"Workload({self.name!r}): batches is missing; give a function batches(seed) that returns an endless iterator"
            )
        for name in ("model", "optimizer", "batches", "loss", *optional):
            value = getattr(self, name)
            if not callable(value) and not (value is None and name in optional):
                such = (
                    ", such as lambda params: torch.optim.AdamW(params, lr=1e-3)"
                    if name == "optimizer"
                    else ""
                )
                raise WorkloadError(
                    f"Workload({self.name!r}): {name} must be a function{such}, got {type(value).__name__}"
                )
        if self.pipeline is not None and not isinstance(self.pipeline, Pipeline):
            raise WorkloadError(
                f"Workload({self.name!r}): pipeline must be a castwise.lab.workloads.workload.Pipeline, got {type(self.pipeline).__name__}"
            )
        if isinstance(self.model, nn.Module):
            raise WorkloadError(
                f"Workload({self.name!r}): model must be a function that makes the model, got a "
                f"{type(self.model).__name__}; give e.g. model=lambda: {type(self.model).__name__}(...)"
            )


def lacks(workload: Workload) -> tuple[str, ...]:
    """Return which of optimizer and loss a workload lacks. Without either it cannot be trained."""
    stands_for = {"optimizer": no_optimizer, "loss": no_loss}
    return tuple(name for name, stand in stands_for.items() if getattr(workload, name) is stand)


# --- finding ------------------------------------------------------------------------------------------------


def find_workload(spec: str) -> Workload:
    """Find a workload, that is a training job, by the name that is typed on the command line.

    Args:
        spec: The name of a built-in workload such as ``sine``, a built-in with options such as
            ``gpt?layers=4&width=384``, ``path/to/file.py:attribute`` or ``package.module:attribute``. The attribute
            is a :class:`castwise.Workload`, or a function without arguments that returns one. The folder of a file
            joins ``sys.path``, as if the file were run as a script.

    Returns:
        The workload.

    Raises:
        WorkloadError: No such workload exists, it cannot be imported, or it is not a workload.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise WorkloadError(
            f"find_workload({spec!r}): expected a name ({', '.join(BUILT_IN)}), file.py:attribute or "
            "package.module:attribute"
        )
    spec = spec.strip()
    name, _, options = spec.partition("?")
    if name in BUILT_IN:
        return _built_in(name, options)
    where, colon, attribute = spec.rpartition(":")
    if not colon or not where or not attribute:
        raise WorkloadError(_not_found(spec, name))
    if not is_encodable(spec):
        raise WorkloadError(f"workload {spec!r}: the name is not valid text here; rename the file")
    is_file = where.endswith(".py") or "/" in where or "\\" in where
    if not is_file and not all(part.isidentifier() for part in where.split(".")):
        raise WorkloadError(
            f"workload {spec!r}: {where!r} is not a module name; name your own workload file.py:attribute or "
            f"package.module:attribute"
        )
    module = _import_file(spec, Path(where).expanduser()) if is_file else _import_module(spec, where)
    return _workload_in(spec, module, attribute)


def _not_found(spec: str, name: str) -> str:
    if name.endswith(".py") or "/" in name or (Path(name).exists() and Path(name).is_file()):
        names = ""
        with contextlib.suppress(OSError):
            found = [line.split("=")[0].split(":")[0].strip() for line in _workload_lines(Path(name))]
            names = f", such as {name}:{found[0]}" if found else ""
        return (
            f"workload {spec!r}: a file needs the attribute that holds the workload: {name}:attribute{names}"
        )
    return (
        f"workload {spec!r} not found{close_matches(name.lower(), BUILT_IN)}; built in are {', '.join(BUILT_IN)}; name your "
        f"own file.py:attribute or package.module:attribute"
    )


def _workload_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [  # lines of the module level only: indented lines belong to functions
        line
        for line in lines
        if not line[:1].isspace() and "Workload(" in line and "=" in line.split("Workload(")[0]
    ]


def _built_in(name: str, options: str) -> Workload:
    make: Callable[..., Workload] = getattr(importlib.import_module(BUILT_IN[name]), name)
    allowed = typing.get_type_hints(make)
    allowed.pop("return", None)
    given: dict[str, Any] = {}
    for part in filter(None, options.split("&")):
        key, equals, text = part.partition("=")
        if key not in allowed:
            raise WorkloadError(
                f"workload {name!r} has no option {key!r}{close_matches(key, allowed)}; allowed: {_options(make, allowed)}"
            )
        if not equals or not text:
            raise WorkloadError(f"workload {name!r}: option {key!r} has no value; write {name}?{key}=...")
        given[key] = _value(name, key, text, allowed[key])
    return make(**given)


def _options(make: Callable[..., Workload], allowed: Mapping[str, Any]) -> str:
    parameters = inspect.signature(make).parameters
    defaults = {key: parameters[key].default for key in allowed}
    return ", ".join(key if value is None else f"{key}={value}" for key, value in defaults.items())


def _value(name: str, key: str, text: str, kind: Any) -> Any:
    """Convert an option's text to the type of its parameter: int, float, or a string that its ``Literal`` allows."""
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if choices:
        if text not in choices:
            raise WorkloadError(
                f"workload {name!r}: option {key}={text!r}; allowed: {', '.join(map(str, choices))}"
            )
        return text
    kinds = [part for part in (typing.get_args(kind) or (kind,)) if part is not types.NoneType]
    try:
        return kinds[0](text)
    except ValueError:
        raise WorkloadError(
            f"workload {name!r}: option {key}={text!r} is not {'a whole number' if kinds[0] is int else 'a number'}"
        ) from None


def _import_file(spec: str, path: Path) -> types.ModuleType:
    if not path.is_file():
        folder = path.parent
        there = [p.name for p in folder.glob("*.py")] if folder.is_dir() else []
        more = close_matches(path.name, there) or "; give the path from the current folder"
        what = "is a folder, not a file" if path.is_dir() else "there is no such file"
        raise WorkloadError(f"workload {spec!r}: {what}: {path}{more}")
    path = path.resolve()
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and not _is_from(loaded, path):
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise WorkloadError(f"workload {spec!r}: {path.name} is not a Python file; name one that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses, pickle and torch.compile look up a function's module there
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, (Exception, SystemExit)):
            raise _does_not_import(spec, error, path) from error
        raise
    return module


def _is_from(module: types.ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


def _import_module(spec: str, name: str) -> types.ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            hint = f"; did you mean {name}.py:...?" if Path(f"{name}.py").is_file() else ""
            raise WorkloadError(
                f"workload {spec!r}: there is no module {error.name!r}{hint or '; install it, or name a file: file.py:attribute'}"
            ) from error
        raise _does_not_import(spec, error, None) from error
    except (Exception, SystemExit) as error:
        raise _does_not_import(spec, error, None) from error


def _does_not_import(spec: str, error: BaseException, path: Path | None) -> WorkloadError:
    """Return the error of a failed import, with its location.

    The location is the last line outside the import machinery, if possible in the imported file.
    """
    if isinstance(error, SyntaxError):
        place = f"{Path(error.filename or '?').name}, line {error.lineno}"
    else:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "importlib" not in frame.filename and Path(frame.filename) != Path(__file__)
        ]
        own = [frame for frame in frames if path is not None and Path(frame.filename) == path]
        last = (own or frames)[-1:]
        place = f"{Path(last[0].filename).name}, line {last[0].lineno}" if last else "the file"
    what = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    return WorkloadError(f"workload {spec!r} does not import: {place}: {' '.join(what.split())}")


def _workload_in(spec: str, module: types.ModuleType, attribute: str) -> Workload:
    names = [n for n, value in vars(module).items() if isinstance(value, Workload)]
    own = [
        n
        for n, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not n.startswith("_")
    ]
    try:
        value = getattr(module, attribute)
    except AttributeError:
        has = names or own
        meant = close_matches(attribute, [*names, *own])
        kind = "workloads" if names else "functions"
        holds = f"its {kind} are {', '.join(has[:8])}" if has else "it holds no workload and no function"
        raise WorkloadError(f"workload {spec!r}: no attribute {attribute!r}{meant}; {holds}") from None
    if isinstance(value, Workload):
        return value
    got = type(value).__name__
    if callable(value) and not isinstance(value, nn.Module):
        try:
            value = value()
        except (Exception, SystemExit) as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise WorkloadError(
                f"workload {spec!r}: {attribute}() failed with {what}; it must be a Workload or a function that returns "
                "one and needs no arguments"
            ) from error
        if isinstance(value, Workload):
            return value
        got = f"a function that returned {type(value).__name__}"
    others = [name for name in names if name != attribute]
    hint = f"; the file's workloads are {', '.join(others[:8])}" if others else ""
    raise WorkloadError(
        f"workload {spec!r}: {attribute} is {got}, expected a castwise.Workload or a function that returns one{hint}"
    )


# --- checking -----------------------------------------------------------------------------------------------


def check_loss(loss: object, workload: Workload | str, batch: Any = None, step: int | None = None) -> Tensor:
    """Check the value that a loss function returned, and return it. If ``step`` is given, the host waits for the device.

    Args:
        loss: The returned value.
        workload: The workload, or the name of the caller, for the message.
        batch: The batch, so that the message can name a tensor with NaN.
        step: Number of the step; with None, the loss is not checked for non-finite values.

    Raises:
        WorkloadError: The loss is not a tensor, not a scalar, not floating, or has no graph.
        NonFiniteError: The loss is NaN or infinite.
    """
    who = workload if isinstance(workload, str) else f"workload {workload.name!r}"
    call, must = f"{who}: loss(model, batch) returned", "it must return a floating tensor with one element"
    if not isinstance(loss, Tensor):
        raise WorkloadError(f"{call} {type(loss).__name__}; {must}, computed by torch and without .item()")
    if loss.numel() != 1 or not loss.is_floating_point():
        cure = ". Reduce it with .mean() or .sum()" if loss.numel() != 1 else ""
        kind = str(loss.dtype).removeprefix("torch.")
        raise WorkloadError(f"{call} a tensor of shape {list(loss.shape)} and {kind}; {must}{cure}")
    if not loss.requires_grad and torch.is_grad_enabled():
        raise WorkloadError(
            f"{call} a tensor without a graph, so the loss is not differentiable: no gradient can reach the model; remove "
            ".detach(), .item(), argmax or no_grad() from it, and check that the model has parameters that require gradients"
        )
    if step is not None and not math.isfinite(value := float(loss.detach())):
        raise NonFiniteError(f"{who}: the loss of step {step} is {value}: {about_data(batch)}")
    return loss


@contextlib.contextmanager
def users_code(call: str) -> Iterator[None]:
    """Convert errors of a user's functions to one sentence with the location. castwise's own errors are raised unchanged.

    Raises:
        WorkloadError: The message starts with ``call``.
    """
    try:
        yield
    except CastwiseError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit in a loss must not end the caller
        if not place(error):
            raise
        raise WorkloadError(f"{call}: {told(error)}") from error


def make_optimizer(workload: Workload, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make a workload's optimizer for steps after a separate backward.

    Raises:
        WorkloadError: The model has nothing to train, or the workload makes no optimizer or one whose step needs a closure.
    """
    who, trained = f"workload {workload.name!r}", list(parameters)
    if not any(parameter.requires_grad for parameter in trained):
        raise WorkloadError(
            f"{who}: no parameter of the model requires a gradient; give a model that is trained"
        )
    with users_code(f"{who}: optimizer(params) failed"):
        optimizer = workload.optimizer(trained)
    if not isinstance(optimizer, Optimizer):
        raise WorkloadError(
            f"{who}: optimizer(params) returned {type(optimizer).__name__}, not a torch.optim.Optimizer; return the optimizer"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        kind = type(optimizer).__name__
        raise WorkloadError(
            f"{who}: {kind}.step() needs a closure and may run the model any number of times, so its steps cannot be compared; "
            "use an optimizer that steps without a closure, such as AdamW. castwise.parity tests gradients without an "
            f"optimizer, and Amp.step(optimizer, closure=...) trains with {kind} in a loop of your own"
        )
    return optimizer


def check_no_backward(model: nn.Module, who: str) -> None:
    """Raise if a loss function has called ``backward`` itself. The model must have had no gradients before.

    Raises:
        WorkloadError: A parameter has a gradient.
    """
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise WorkloadError(
            f"{who}: loss(model, batch) calls backward itself; return the loss and leave backward to castwise, which scales the "
            "loss if the plan has a loss scale"
        )


def next_batch(workload: Workload, batches: Iterator[Any], taken: int) -> Any:
    """Return the workload's next batch; ``taken`` batches came before it.

    Raises:
        WorkloadError: The batches have ended.
    """
    try:
        return next(batches)
    except StopIteration:
        raise WorkloadError(
            f"workload {workload.name!r}: batches(seed) ended after {taken} batches; make it an endless iterator, or ask "
            "for fewer steps"
        ) from None


def about_data(batch: Any) -> str:
    """Say in a clause whether a non-finite loss comes from the data. The host waits for the device."""
    if holders := non_finite_parts(batch):
        return f"its data contains NaN or infinite values, in {'; '.join(holders[:3])}; clean the data first"
    return "its data is finite, so look at the model's weights and its loss"


def non_finite_parts(batch: Any, path: str = "batch") -> list[str]:
    """Return the names of a batch's tensors with non-finite values, such as ``batch[0] (3 of 256 values)``."""
    if isinstance(batch, Tensor):
        if not (batch.is_floating_point() or batch.is_complex()):
            return []
        bad = int((~torch.isfinite(batch.detach())).sum())
        return [f"{path} ({bad} of {batch.numel()} values)"] if bad else []
    if isinstance(batch, Mapping):
        return [hit for key, value in batch.items() for hit in non_finite_parts(value, f"{path}[{key!r}]")]
    if isinstance(batch, (list, tuple)):
        return [hit for i, value in enumerate(batch) for hit in non_finite_parts(value, f"{path}[{i}]")]
    return []
