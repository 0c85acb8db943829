"""Export a model under a plan as a program of ``torch.export`` that runs where castwise is not installed."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting import tracing
from castwise.core.casting.trees import map_tensors
from castwise.core.plans.plan import Plan, as_plan
from castwise.core.plans.text import some
from castwise.core.serve.plain import check, copied_under, of_the_model, stored_tensors
from castwise.errors import CastwiseError, StateError


def export(
    model: nn.Module,
    plan: Plan | str | os.PathLike[str] | torch.dtype,
    example: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """Export a model under a plan as a program of ``torch.export``.

    The casts of the plan are operators of the program's graph, and its weights are stored as the plan stores them for inference.
    So the program runs where castwise is not installed: save it with ``torch.export.save``, compile it with
    ``torch._inductor.aoti_compile_and_package``, or give it to ``torch.onnx.export``. The model is copied and stays as it is. The
    program is run once on ``example`` and its outputs are compared with those of the copy under the plan.

    Args:
        model: The model, in evaluation mode, on its device, not prepared. Training may have ended under any plan.
        plan: The plan, in any form that :class:`castwise.Amp` accepts. Its compiler, optimizer, loss scale and process-wide settings
            are no part of the program.
        example: The positional arguments of a call of the model, as a tuple, or one tensor.
        kwargs: The keyword arguments of that call.
        dynamic_shapes: Which sizes may differ from those of the example, as ``torch.export.export`` takes it. By default none may.

    Returns:
        The program, in the operators of ATen below autograd. Its parameters do not require gradients.

    Raises:
        StateError: The model is in training mode or prepared, or torch cannot export it.
        PlanError, PatternError, DeviceError: The plan does not fit the model or its device.

    Warns:
        UserWarning: A call of the model assigns buffers anew, outputs of the program differ from those of the model under the
            plan, or the plan has a process-wide setting.

    Example::

        program = castwise.export(model, "bf16-mixed", (inputs,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, "model.pt2")
    """
    check("export", model)
    args = example if isinstance(example, tuple) else (example,)
    named = dict(kwargs or {})
    kind = type(model).__name__
    with copied_under(model, of_the_model(as_plan(plan), "export")) as copied:
        with _unchanged_buffers(copied) as assigned:
            want = _outputs(copied, args, named)
        if assigned:
            warnings.warn(
                f"export: a call of this {kind} assigns its buffers {some(assigned)} anew, and the program has them as they are now at "
                "every call; write them in place (buffer.copy_(...)) if calls depend on earlier ones",
                stacklevel=2,
            )
        try:
            with _quiet(), tracing.contained():
                program = _torch.export.export_with_casts(copied, args, named, dynamic_shapes)
        except CastwiseError:
            raise
        except Exception as error:
            raise StateError(
                f"export: torch.export cannot trace this {kind}: {_first_lines(error)} Export the unprepared model with "
                "torch.export.export(model, args, strict=False) to see whether the model or the plan is the reason"
            ) from error
        _own_tensors(program, copied)
        with _unchanged_buffers(copied):  # the program shares the memory of its buffers
            _compare(kind, want, _outputs(program.module(), args, named))
    return program


def _own_tensors(program: torch.export.ExportedProgram, copied: nn.Module) -> None:
    """Give a program tensors of its own, since those of the copy get their former dtype when the plan is taken off."""
    stored = stored_tensors(copied)
    names = {id(tensor): name for name, tensor in [*copied.named_parameters(), *copied.named_buffers()]}
    for held in (program.state_dict, program.constants):
        for key, value in [*held.items()]:
            if isinstance(value, Tensor) and id(value) in names:
                held[key] = stored[names[id(value)]]


@contextlib.contextmanager
def _unchanged_buffers(model: nn.Module) -> Iterator[list[str]]:
    """Return a context manager that gives a model the buffers that it had before, with their values.

    Its value is a list, which has the names of buffers that were other tensors at the end.
    """
    held = [
        (module, path, key, buffer, buffer.detach().clone())
        for path, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
    ]
    assigned: list[str] = []
    try:
        yield assigned
    finally:
        with torch.no_grad():
            for module, path, key, buffer, values in held:
                if getattr(module, key, None) is not buffer:
                    assigned.append(f"{path}.{key}".lstrip("."))
                buffer.copy_(values)
                setattr(module, key, buffer)


@torch.no_grad()
def _outputs(run: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors in the outputs for the example, which is copied, with the random state of now."""
    cuda = {tensor.device for tensor in _tensors_in((args, kwargs)) if tensor.device.type == "cuda"}
    with torch.random.fork_rng([*cuda]):
        return _tensors_in(run(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs))))


def _tensors_in(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, tree)  # type: ignore[func-returns-value]
    return found


def _compare(kind: str, want: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    """Warn if a program gives other outputs for the example than the model from which it was made."""
    worst = 0.0
    for one, other in zip(want, got, strict=True):
        one, other = (
            (torch.view_as_real(each.resolve_conj()) if each.is_complex() else each).double()
            for each in (one, other)
        )
        if not torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True):
            scale = one.nan_to_num().abs().max().clamp_min(torch.finfo(torch.float64).tiny)
            worst = max(worst, float((one - other).abs().nan_to_num(nan=math.inf).max() / scale))
    if worst:
        warnings.warn(
            f"export: outputs of the exported {kind} differ from those of the model under the plan, by up to {worst:.2g} of the "
            "largest. Reasons can be kernels that torch.export takes apart, such as those of an LSTM, random draws, and Python state that "
            "a call changes.",
            stacklevel=3,
        )


@contextlib.contextmanager
def _quiet() -> Any:
    """Hide what torch's own tracing warns of, which concerns its developers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings(
            "ignore", "The tensor attributes .*_flat_weights"
        )  # recurrent layers set these attributes again
        yield


def _first_lines(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text[:400] + " ...") if len(text) > 400 else text or type(error).__name__
