"""Run a workload's training steps or inference calls under a plan, so that several plans can be timed in turns."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from castwise.core import _torch, devices
from castwise.core.casting.trees import map_tensors, tensors_in, to_device
from castwise.core.model.arrival import store_, widen_, widen_for
from castwise.core.plans.plan import Plan
from castwise.core.ranks import ALONE
from castwise.core.scaler import StepResult
from castwise.core.session import Amp
from castwise.core.session.process import Claim, check_device
from castwise.core.session.storage import silent_about_rounding
from castwise.errors import WorkloadError
from castwise.lab.passes.isolation import unmoved
from castwise.lab.workloads.workload import (
    Workload,
    check_loss,
    check_no_backward,
    make_optimizer,
    next_batch,
    no_loss,
)


def build_model(
    workload: Workload, device: torch.device, seed: int, state: Mapping[str, torch.Tensor] | None = None
) -> nn.Module:
    """Build a workload's model, with weights drawn from the seed or given as a state dict.

    The model is in training mode. If it was so already, modules that ``workload.model()`` put into evaluation mode (frozen
    BatchNorm) stay in evaluation mode.

    Raises:
        WorkloadError: ``workload.model()`` did not return an ``nn.Module``, or returned a scripted or traced one.
    """
    torch.manual_seed(seed)
    model = workload.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"workload {workload.name!r}: model() returned {type(model).__name__}, not a torch.nn.Module; "
            "return the module"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise WorkloadError(
            f"workload {workload.name!r}: model() returned a scripted or traced model, which runs code of its own that a plan's "
            "casts do not reach; return the module that it was made from"
        )
    model = model.to(device)
    if state is not None:
        model.load_state_dict(state)
    return model if model.training else model.train()


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Return a block in which compiled models run uncompiled, since one evaluation takes less time than compiling for it."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


class _RandomState:
    """One run's own state of torch's random generators, so that dropout draws the same whatever other runs draw in between."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generators = [devices.generator(where) for where in {torch.device("cpu"), device}]
        with self.in_force():
            torch.manual_seed(seed)
            self._mine = self._get()
        self._outer: list[torch.Tensor] | None = None

    def _get(self) -> list[torch.Tensor]:
        return [get() for get, _ in self._generators]

    def _set(self, states: list[torch.Tensor]) -> None:
        for (_, put), state in zip(self._generators, states, strict=True):
            put(state)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        outer = self._get()
        try:
            yield
        finally:
            self._set(outer)

    def enter(self) -> None:
        self._outer = self._get()
        self._set(self._mine)

    def leave(self) -> None:
        if self._outer is not None:
            self._mine = self._get()
            self._set(self._outer)
            self._outer = None


class _Run:
    """The base class of runs of a model under a plan, which are timed in turns with other runs in one process.

    The process-wide settings of the plan and the random states of the run apply only while a block of steps runs. So plans with
    conflicting process-wide settings can be timed in turns.

    Attributes:
        model: The model.
        amp: The session of the plan.
        compilations: Number of compilations so far, if the plan compiles.
        compile_s: Seconds that the compilations took.
        losses: Losses of the training steps.
    """

    model: nn.Module
    amp: Amp

    def __init__(self, plan: Plan, device: torch.device, seed: int) -> None:
        check_device(plan, device.type)
        self._device = device
        self._claim = Claim(plan, device.type)
        self._random = _RandomState(device, seed)
        self._compiles = plan.compile != "as_given"
        self._compiled = 0, 0.0
        self.compilations = 0
        self.compile_s = 0.0
        self.losses: list[float] = []
        self._without_settings = replace(plan, fp32_matmul="as_is", fp32_conv="as_is", host_memory="as_given")

    def before(self, steps: int) -> None:
        """Fetch the data of a block of steps, and apply the plan's process-wide settings and the run's random states."""
        if self._compiles:
            self._compiled = _torch.dynamo.compilations()
        self._random.enter()
        self._fetch(steps)
        self._claim.take()

    def _fetch(self, steps: int) -> None:
        pass

    def run(self, steps: int) -> None:
        """Run a block of steps."""
        raise NotImplementedError

    def after(self) -> None:
        """Restore the process-wide settings and random states."""
        self._claim.close()
        self._random.leave()
        if self._compiles:
            count, seconds = _torch.dynamo.compilations()
            self.compilations += count - self._compiled[0]
            self.compile_s += seconds - self._compiled[1]
            self._compiled = count, seconds

    def block(self, steps: int) -> None:
        """Run a block of steps with its preparation and cleanup, without timing it."""
        try:
            self.before(steps)
            self.run(steps)
        finally:
            self.after()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode under the whole plan, without gradients and uncompiled.

        After the block, the model is in the same mode as before.
        """
        was = self.model.training
        try:
            self.before(0)
            with torch.inference_mode(), uncompiled():
                yield self.model.eval()
        finally:
            self.model.train(was)
            self.after()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the present weights on the CPU, in fp32, by the keys of the model's state dict."""
        return {
            key: value.detach().to("cpu", copy=True)
            for key, value in self.amp.model_state_dict(self.model).items()
        }

    def close(self) -> None:
        """Remove the plan from the model and release the model."""
        self.amp.close()
        del self.model


class TrainingRun(_Run):
    """Trains a model under a plan and keeps the losses.

    Every run with the same seed starts from the same weights and sees the same batches and random draws.

    Args:
        workload: Provides the model, the optimizer and the batches.
        plan: The plan to train under.
        device: The device of model and batches.
        seed: Seed of weights and data.
        state: Initial weights, if they must be equal to another run's; by default drawn from the seed.

    Attributes:
        skipped_steps: Number of steps that the gradient scaler skipped.
        updates_s: Seconds of host time that the optimizer's step took, for each step.

    Raises:
        DeviceError: The device cannot run the plan.
        CastwiseError: The plan does not fit the model.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        device: torch.device,
        seed: int = 0,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(plan, device, seed)
        self._workload = workload
        with self._random.in_force():
            self.model = build_model(workload, device, seed, state)
            self.optimizer = make_optimizer(workload, self.model.parameters())
            self._restored = contextlib.ExitStack()
            self._restored.enter_context(unmoved(self.optimizer, self.model))
            self.amp = Amp(self._without_settings, device=device, group=ALONE)
            self.amp.prepare(self.model, self.optimizer, widen=widen_for(plan, self.model))
            self._batches = iter(workload.batches(seed))
        self._block: list[Any] = []
        self._losses: list[torch.Tensor] = []
        self._results: list[StepResult] = []
        self.skipped_steps = 0
        self.updates_s: list[float] = []

    def _fetch(self, steps: int) -> None:
        taken = len(self.losses)
        batches = (next_batch(self._workload, self._batches, taken + i) for i in range(steps))
        self._block = [to_device(batch, self._device) for batch in batches]

    def run(self, steps: int) -> None:
        """Train on the batches that were fetched; waits for the device only if the gradient scaler has to."""
        workload, model, optimizer, amp = self._workload, self.model, self.optimizer, self.amp
        for batch in self._block[:steps]:
            loss = workload.loss(model, batch)
            if not self.losses and not self._losses:
                check_no_backward(model, f"workload {workload.name!r}")
            check_loss(loss, workload)
            amp.backward(loss)
            begin = time.perf_counter()
            result = amp.step(optimizer)
            self.updates_s.append(time.perf_counter() - begin)
            optimizer.zero_grad()
            self._losses.append(loss.detach())
            self._results.append(result)

    def after(self) -> None:
        """Read the block's losses and restore the process-wide settings and random states."""
        super().after()
        self._block = []
        self.losses += [float(loss) for loss in self._losses]
        self.skipped_steps += sum(result.skipped for result in self._results)
        self._losses, self._results = [], []

    def close(self) -> None:
        """Remove the plan from the model, and release model and optimizer.

        Tensors that the optimizer changed but that are not in the model are restored.
        """
        super().close()
        self._restored.close()
        del self.optimizer


def served_call(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a mapping as keyword arguments, a tuple or a list as arguments, all else as one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def served(workload: Workload, model: nn.Module, batch: Any) -> Callable[[], Any]:
    """Return a function that calls a model for a batch as it is called when it is served, and returns the outputs.

    That is ``workload.outputs``. Without it, the model is called with the arguments that ``workload.loss`` gives it, without the
    loss itself. If the loss calls the model more than once, or not at all, the whole loss is called. Without a loss, the batch
    is the model's arguments.

    Args:
        workload: Defines outputs or loss.
        model: The model, as it was built, before it is prepared. The loss is called once here to see the arguments.
        batch: A batch on the model's device.
    """
    if workload.outputs is not None:
        return functools.partial(workload.outputs, model, batch)
    if workload.loss is no_loss:
        return functools.partial(served_call, model, batch)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = model.register_forward_pre_hook(
        lambda _module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    arrived = widen_(model)
    try:
        with torch.no_grad():
            workload.loss(model, batch)
    finally:
        hook.remove()
        store_(model, arrived)
    if len(calls) == 1:
        args, kwargs = calls[0]
        return lambda: model(*args, **kwargs)
    return lambda: workload.loss(model, batch)


def outputs_of(workload: Workload, model: nn.Module, batch: Any) -> Any:
    """Return what a model returns when it is called for a batch as it is served (:func:`served`).

    With a loss and without ``workload.outputs``, it is what the model returns inside the loss: a tuple if it is called more than
    once, and the loss if it is not called.
    """
    if workload.outputs is not None or workload.loss is no_loss:
        return served(workload, model, batch)()
    found: list[Any] = []
    hook = model.register_forward_hook(lambda _module, _args, output: found.append(output))
    try:
        loss = workload.loss(model, batch)
    finally:
        hook.remove()
    return (tuple(found) or loss) if len(found) != 1 else found[0]


def resized(workload: Workload, first: Any, others: Iterator[Any], size: int) -> Any:
    """Return a batch of ``size`` samples: ``first``, and as many of ``others`` as are needed, joined and cut.

    Samples are joined along the first dimension of every tensor.

    Raises:
        WorkloadError: The tensors of a batch do not have the same number of samples.
    """
    parts: list[list[torch.Tensor]] = []
    samples = 0
    while samples < size:
        batch = next_batch(workload, others, len(parts)) if parts else first
        tensors = tensors_in(batch)
        counts = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
        if len(counts) != 1 or 0 in counts:
            raise WorkloadError(
                f"workload {workload.name!r}: batch_sizes needs batches whose tensors all have the samples in their first "
                f"dimension; this batch has tensors of shapes {', '.join(str(list(t.shape)) for t in tensors[:5])}"
            )
        parts.append(tensors)
        samples += counts.pop()
    joined = {id(column[0]): torch.cat(column)[:size] for column in zip(*parts, strict=True)}
    return map_tensors(lambda tensor: joined[id(tensor)], first)


class InferenceRun(_Run):
    """Runs a model in evaluation mode under a plan, with weights cast once, under ``torch.inference_mode``.

    One step is one call of the model for one batch, as :func:`served` makes it.

    Args:
        workload: Provides the model and the batch.
        plan: The plan to run under.
        device: The device of model and batch.
        seed: Seed of weights and data.
        state: Weights, if they must be equal to another run's; by default drawn from the seed.
        batch_size: Number of samples of the batch. By default the workload's batch is used as it is.
        autocast: Whether to run the model as it is given under one line of ``torch.autocast`` in the plan's format instead, which
            casts the weights in each call.

    Raises:
        DeviceError: The device cannot run the plan.
        CastwiseError: The plan does not fit the model.
    """

    updates_s: Sequence[float] = ()
    """Empty, because no optimizer steps."""

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        device: torch.device,
        seed: int = 0,
        state: Mapping[str, torch.Tensor] | None = None,
        batch_size: int | None = None,
        autocast: bool = False,
    ) -> None:
        super().__init__(plan, device, seed)
        with self._random.in_force():
            self.model = build_model(workload, device, seed, state).eval()
            batches = iter(workload.batches(seed))
            batch = next_batch(workload, batches, 0)
            if batch_size is not None:
                batch = resized(workload, batch, batches, batch_size)
            batch = to_device(batch, device)
            self._call = served(workload, self.model, batch)
        self.amp = Amp(self._without_settings, device=device, group=ALONE)
        self._around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if autocast:
            self._around = functools.partial(torch.autocast, device.type, plan.compute_dtype)
        else:
            self.amp.prepare(self.model, inference=True, widen=widen_for(plan, self.model, serves=True))

    def run(self, steps: int) -> None:
        """Call the model ``steps`` times."""
        with torch.inference_mode(), self._around():
            for _ in range(steps):
                self._call()

    def close(self) -> None:
        """Remove the plan from the model and release it, with weights that may be rounded."""
        with silent_about_rounding():
            super().close()
        del self._call
