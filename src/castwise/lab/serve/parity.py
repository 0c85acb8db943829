"""``output_parity``: test whether a served model's outputs under a plan are as good as fp32's.

The model runs in fp32 and under the plan on the same batches, in evaluation mode and without gradients. The differences of the
outputs are held against the *floor*: what changes in fp32's outputs when the weights, and the floating inputs that the plan's
format does not hold exactly, are perturbed by up to half a unit in the last place of that format. That is what storing weights and
inputs in the format does at best. :mod:`castwise.lab.serve.verdicts` says how a verdict follows.

A plan that compiles is tested without compiling.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from castwise.core.plans.plan import Plan, as_plan
from castwise.core.session.process import check_device, find_device
from castwise.errors import PlanError, WorkloadError, check_count
from castwise.lab.parity.batches import endless, period
from castwise.lab.parity.parity import device_of
from castwise.lab.passes.isolation import undisturbed, unspoilt
from castwise.lab.serve.comparison import LEAST, OutputTest
from castwise.lab.serve.outputs import KINDS
from castwise.lab.serve.result import OutputParity
from castwise.lab.serve.runs import Call, Evaluate
from castwise.lab.serve.verdicts import LINE
from castwise.lab.timing.runners import served_call
from castwise.lab.workloads.workload import users_code

__all__ = ["OutputParity", "OutputTest", "output_parity"]

BATCHES = 32


def output_parity(
    model: nn.Module,
    plan: Plan | str,
    batches: Any,
    *,
    call: Call | None = None,
    outputs: str | Sequence[str] = "*",
    kind: str | Mapping[str, str] | None = None,
    evaluate: Evaluate | None = None,
    line: float = LINE,
    count: int | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> OutputParity:
    """Test whether a model's outputs under a plan are as good as those of fp32, for a model that is not trained any more.

    A plan decides in which formats a model computes and stores its weights. The model's outputs under the plan are
    compared with those in fp32, and the difference is held against what rounding does at best: weights and inputs are
    perturbed at random by up to half a unit in the last place of the plan's format, and the model runs in fp32. The
    model itself is not changed.

    Args:
        model: The model, in evaluation mode.
        plan: The plan to test, as a preset's name, a plan in one line, the path of a plan's file, or a ``Plan``.
        batches: The batches: a sequence, a DataLoader, or a function of a seed that returns an iterator.
        call: A function ``call(model, batch)`` that returns the outputs: tensors in tuples, lists, mappings or dataclasses.
            By default a mapping is passed as keyword arguments, a tuple or list as arguments, and all else as one.
        outputs: The names of the outputs to compare, such as ``logits``; ``*`` stands for any text. By default all
            outputs are compared that have at least one dimension.
        kind: What the outputs are for, where the default does not fit: ``logits``, ``scores``, ``values`` or
            ``integers``, for all outputs or by name. By default integers and booleans are ``integers``. Floating
            outputs of shape ``[batch]`` or ``[batch, 1]`` are ``scores``. Those of two or three dimensions, of which
            the last has at least two classes, are ``logits``, unless they are named like states or embeddings. All
            others are ``values``.
        evaluate: A function ``evaluate(model)`` that returns metrics by name, which are compared too.
        line: The multiple of the error of rounding up to which a plan passes.
        count: The number of batches. By default 32, or as many different batches as there are, but at least two.
        device: The device to run on. By default it is the device of the model's parameters.
        seed: The seed of the random rounding. If ``batches`` is a function, it is called with this seed too.

    Returns:
        The result, which is true in an ``if`` statement when the plan passed. Its main parts are ``.verdict``,
        ``.reason``, ``.outputs`` and ``.table()``.

    Raises:
        WorkloadError: The outputs have no tensors, are random, or change their shape when the same batch runs again.
            Or there are too few batches, or the model fails.
        PlanError: The plan does not fit the model, or an argument is out of its range.
        DeviceError: The device cannot run the plan.

    Warns:
        UserWarning: The model is in training mode. A copy is tested in evaluation mode.

    Source: bench/bench_serving_parity.py counts how many planted failures fail, and how many sound models pass.
    """
    chosen = as_plan(plan)
    kinds = {"*": kind} if isinstance(kind, str) else dict(kind or {})
    for name in kinds.values():
        if name not in KINDS:
            raise PlanError(f"output_parity(kind={kind!r}): {name!r} is none of {', '.join(KINDS)}")
    if not line > 0:
        raise PlanError(f"output_parity(line={line!r}): needs a number above 0")
    if count is not None:
        check_count("output_parity", "count", count, LEAST)
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"output_parity: model is {type(model).__name__}; give the torch.nn.Module itself"
        )
    where = find_device("output_parity", device, str(device_of(model)))
    check_device(chosen, where.type)
    given = list(itertools.islice(endless(batches, "output_parity")(seed), count or BATCHES))
    given = given[: period(given)]
    if len(given) < (count or LEAST):
        raise WorkloadError(
            f"output_parity: batches has {len(given)} different batch{'es' * (len(given) != 1)}; needs at least {count or LEAST}"
        )
    with users_code("output_parity: the model failed"), undisturbed(), unspoilt(model, "output_parity"):
        test = OutputTest(
            model, call or served_call, iter(given), where, seed=seed, line=line,
            outputs=(outputs,) if isinstance(outputs, str) else outputs, kinds=kinds,  # type: ignore[arg-type]
        )  # fmt: skip
        test.reference(len(given))
        result = test.test(chosen)
        if evaluate is not None:
            result = test.with_metrics(result, evaluate)
    return result
