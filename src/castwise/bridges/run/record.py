"""Implements ``castwise try --tune``: records a script's model, optimizer and first batches in fp32, and tunes a plan for them.

:func:`castwise.tune` needs a model, a function ``loss(model, batch)``, batches and an optimizer. The model is copied when the
script first calls it. :mod:`~castwise.bridges.run.tape` records the batch and the computation of the loss in each iteration of
the script's training loop. A new optimizer is made from the class and the parameter groups of the script's optimizer. The first
loss is recomputed at once from the recording. If the result differs from the script's loss, nothing is tuned.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.bridges.run.execute import end, execute, last_words
from castwise.bridges.run.follow import holds, is_trained
from castwise.bridges.run.gate import EnoughError
from castwise.bridges.run.tape import Recording, TapeLoss
from castwise.commands.jobs.tune import tune
from castwise.commands.jobs.tune_result import TuneResult
from castwise.core import _torch, devices
from castwise.core.parallel import wrappers
from castwise.errors import CastwiseError, sentence

BATCHES, LARGEST_BYTES = 32, 256 << 20
"""Limits of the recording: the number of batches, and the size of their tensors in bytes."""
_IN_ITS_PROCESS = "import sys; from castwise.bridges.run.record import main; main(sys.argv[1:])"


@dataclass(frozen=True)
class SameOptimizer:
    """A callable ``optimizer(params)`` that makes an optimizer like the script's for other parameters.

    Attributes:
        kind: The class of the optimizer.
        groups: The options of each parameter group. ``params`` holds indices into the list of the model's parameters.
        options: The defaults with which the class is called.
    """

    kind: type[Optimizer]
    groups: tuple[dict[str, Any], ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer, model: nn.Module) -> SameOptimizer:
        """Return a callable that makes optimizers with the settings of ``optimizer``, which updates the model's parameters."""
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        groups = tuple(
            {**group, "params": [places[id(p)] for p in group["params"] if id(p) in places]}
            for group in optimizer.param_groups
        )
        taken = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in taken}
        return cls(type(optimizer), groups, options)

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return an optimizer for the parameters of another model of the same structure."""
        own = list(parameters)
        groups = [{**group, "params": [own[place] for place in group["params"]]} for group in self.groups]
        return self.kind([group for group in groups if group["params"]], **self.options)


class ScriptCapture:
    """Records a running script until there is enough data to tune. Call :meth:`begin` before the script runs.

    Attributes:
        model: A copy of the script's model, made before its first step. None until then.
        trouble: The reasons why iterations of the training loop could not be recorded.
        refusal: The reason why the script cannot be tuned, or None.
    """

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.trouble: list[str] = []
        self.refusal: str | None = None
        self._recording: Recording | None = None
        self._optimizers: list[Optimizer] = []
        self._ours: nn.Module | None = None
        self._random: Tensor | None = None
        self._inside = False
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Start recording the script's optimizers, model calls and backward passes."""
        self._undo = [
            _torch.optimizers.after_optimizers(self._optimizers.append), _torch.hooks.around_calls(self._call), _torch.autograd.around_backward(self._backward)
        ]  # fmt: skip

    def _call(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        model = wrappers.unwrap(module)
        if self._inside or not torch.is_grad_enabled():
            return call(module, *args, **kwargs)
        if model is not self._ours:
            if not is_trained(model) or not any(holds(optimizer, model) for optimizer in self._optimizers):
                return call(module, *args, **kwargs)
            self._meet(model)
        assert self._recording is not None
        taken = self._recording.take(args, kwargs)
        self._inside = True
        self._recording.stop()
        try:
            out = call(module, *args, **kwargs)
        finally:
            self._recording.start()
            self._inside = False
        self._recording.write(None, taken, args, out)
        return out

    def _meet(self, model: nn.Module) -> None:
        if self._ours is not None:
            kinds = f"{type(self._ours).__name__} and {type(model).__name__}"
            self._refuse(f"the script trains several models, or calls parts of a model separately ({kinds})")
        if torch.is_autocast_enabled(next(model.parameters()).device.type):
            self._refuse(
                "the script runs its model in torch.autocast, so there is no fp32 run to compare with"
            )
        self._ours, self.model, self._random = model, copy.deepcopy(model), torch.get_rng_state()
        self._recording = Recording(model)
        self._recording.start()

    def _backward(self, call: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = call(outputs, *args, **kwargs)
        recording = self._recording
        if (
            recording is None
            or _torch.autograd.graph_task_id() != -1
            or not kwargs.get("accumulate_grad", True)
        ):
            return found
        if len(outputs) != 1 or outputs[0].numel() != 1:
            self.trouble.append("backward is called on something other than one scalar loss")
            recording.clear()
        elif why := recording.finish(outputs[0]):
            self.trouble.append(why)
        elif len(recording.tapes) == 1:
            self._check(outputs[0])
        if len(recording.tapes) >= BATCHES or recording.size > LARGEST_BYTES:
            raise EnoughError
        return found

    def _check(self, loss: Tensor) -> None:
        """Compute the first loss again from the recording, with the same random numbers, and refuse to tune if it differs."""
        assert self._recording is not None
        assert self._random is not None
        assert self.model is not None
        with devices.same_random_numbers([loss.device.type]):
            torch.set_rng_state(self._random)
            repeated = TapeLoss(self._recording.tapes)(
                copy.deepcopy(self.model), self._recording.batches[0]
            ).detach()
        if not torch.allclose(repeated, loss.detach(), rtol=1e-3, atol=1e-6):
            self._refuse(
                f"the loss of the first batch is {loss.item():.6g} in the script, but {repeated.item():.6g} when it is computed again "
                "from the recording"
            )

    def _refuse(self, why: str) -> NoReturn:
        self.refusal = why
        raise EnoughError

    def end(self) -> None:
        """Stop recording."""
        while self._undo:
            self._undo.pop()()
            if not self._undo and self._recording is not None:
                self._recording.stop()

    def job(self) -> dict[str, Any]:
        """Return the recording as arguments of :func:`castwise.tune`.

        Raises:
            CastwiseError: Nothing can be tuned.
        """
        recording, model = self._recording, self._ours
        optimizers = [
            optimizer for optimizer in self._optimizers if model is not None and holds(optimizer, model)
        ]
        if self.refusal is None and len(optimizers) > 1:
            self.refusal = "several optimizers update the model: " + ", ".join(
                type(o).__name__ for o in optimizers
            )
        if recording is None or model is None or not recording.batches or self.refusal is not None:
            nothing = "the script trained no model with an optimizer of torch"
            raise CastwiseError(
                f"castwise try --tune: {self.refusal or next(iter(self.trouble), nothing)}. Write a castwise.Workload, and run castwise "
                "tune file.py:attribute"
            )
        return {
            "model": self.model, "loss": TapeLoss(tuple(recording.tapes)), "batches": recording.batches,
            "optimizer": SameOptimizer.of(optimizers[0], model),
        }  # fmt: skip


def tune_script(
    script: str, arguments: Sequence[str], folder: Path, *, is_module: bool, **settings: Any
) -> TuneResult:
    """Record a script in a separate process, tune a plan for the recording there, and return the result.

    Args:
        script: Path of the script, or name of the module.
        arguments: The script's arguments.
        folder: Working folder of the script.
        is_module: Run ``script`` as a module, like ``python -m``.
        settings: Further arguments of :func:`castwise.tune`, as JSON values.

    Raises:
        CastwiseError: The script failed, or cannot be tuned.
    """
    here, there = Pipe()
    terminal = os.dup(2)
    given = (str(there.fileno()), str(terminal), json.dumps(settings), "-m" if is_module else "")
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _IN_ITS_PROCESS, *given, script, *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, pass_fds=[there.fileno(), terminal], start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(terminal)
            there.close()
        try:
            found: TuneResult | str = here.recv()
        except EOFError:
            process.wait()
            log.seek(0)
            last = last_words(log.read().decode(errors="replace").splitlines())
            found = f"castwise try {script!r}: the script failed. Its last output: {last}"
        finally:
            end(process, 0)
    if isinstance(found, str):
        raise CastwiseError(found)
    return found


def main(words: Sequence[str]) -> None:
    """Record and tune a script: the entry point of the process that :func:`tune_script` starts."""
    pipe, terminal, settings, module, script, *arguments = words
    told, capture = Connection(int(pipe)), ScriptCapture()
    capture.begin()
    try:
        execute(script, arguments, is_module=bool(module))
    except EnoughError:
        pass
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    capture.end()
    os.dup2(int(terminal), 2)
    try:
        told.send(tune(**capture.job(), progress=True, **json.loads(settings)))
    except CastwiseError as error:
        told.send(sentence(error))
    os._exit(0)  # skips the script's exit handlers
