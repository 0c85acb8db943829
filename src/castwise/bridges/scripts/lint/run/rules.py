"""The rules: each looks in an abstract run for one precision error that raises no exception."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from typing import NamedTuple

from castwise.bridges.scripts.lint.run.names import OF_SCALERS, is_optimizer
from castwise.bridges.scripts.lint.run.trace import Trace
from castwise.bridges.scripts.lint.run.values import (
    Arguments,
    Autocast,
    Box,
    Const,
    Contexts,
    Facts,
    Instance,
    Low,
    Optimizer,
    Place,
    Scaler,
    Scope,
    State,
    Unknown,
    Value,
    code,
    reachable,
)

_KEEPS_MASTERS = re.compile(
    r"^\s*(?:from|import)\s+[^\n]*(castwise|deepspeed|apex|colossalai|accelerate|lightning|torchao|bitsandbytes|fairscale|megatron|transformer_engine|optimi\b)",
    re.MULTILINE,
)
"""Imports of libraries whose optimizers keep fp32 values of low parameters, or that set precision themselves."""
_NO_TRAINING = re.compile(r"get_peft_model|LoraConfig|\bfreeze\w*\(")
"""Words of scripts that train only a part of a model, whose weights may be fp32."""


_CONTEXTS = re.compile(r"(^|[._])(no_sync|\w*sync|\w*kernel|\w*anomaly|\w*grad|autocast|profile|record_function|suppress|\w*lock|fork_rng|\w*mode|\w*context|\w*ctx|stream|device|checkpoint_hooks|saved_tensors_hooks|save_on_cpu)$")  # fmt: skip
"""Names of functions that return a context manager."""


@dataclasses.dataclass(eq=False)
class Gradients:
    """What is in the gradients that a scaler has scaled.

    Attributes:
        is_scaled: Whether a backward has added scaled gradients since the last step.
        unscaled: The optimizers whose gradients were unscaled since the last step.
        clips: The places of clipping while gradients were scaled.
        reads: Whether the scale was read since the last backward, so that the script may divide by it itself.
        backwards: The number of backwards until now.
        divided: Per optimizer the place of the last ``unscale_``, and the number of backwards until then; taken out when
            its gradients are stepped or set to zero.
    """

    is_scaled: bool = False
    unscaled: set[Value] = dataclasses.field(default_factory=set)
    clips: list[Place] = dataclasses.field(default_factory=list)
    reads: bool = False
    backwards: int = 0
    divided: dict[Value, tuple[Place, int]] = dataclasses.field(default_factory=dict)


class Save(NamedTuple):
    """A checkpoint with the state of optimizers.

    Attributes:
        place: The call that saves it.
        optimizers: The optimizers whose state it holds.
        boxes: The dictionaries that hold these states.
        frames: The functions that are being executed, from outside in, each with the place that it has reached.
    """

    place: Place
    optimizers: set[Value]
    boxes: list[Box]
    frames: list[tuple[Scope, Place]]

    def place_for(self, scaler: Value) -> Place:
        """Where the scaler's state could be added."""
        for box in self.boxes:
            if box.maker is not None and _reaches(box.maker, scaler):
                return box.place
        return _innermost(self.frames, scaler) or self.place


def _innermost(frames: list[tuple[Scope, Place]], scaler: Value) -> Place | None:
    """The place that was reached in the innermost code that can use the scaler."""
    return next((at for scope, at in reversed(frames) if _reaches(scope, scaler)), None)


def _reaches(scope: Scope, scaler: Value) -> bool:
    """Whether code in a scope can use a scaler, or another that the same call made: by a name, or through what a name holds."""
    here: Scope | None = scope
    while here is not None:
        held = reachable(list(here.values.values()))
        if any(each is scaler or (isinstance(each, Scaler) and each.place == scaler.place) for each in held):
            return True
        here = here.outer
    return False


class Rules:
    """Follows the uses of mixed precision in one run, and reports errors.

    Args:
        facts: What all runs show; this run adds to it.
        trace: Where the run is.

    Attributes:
        found: The errors: place and rule.
        later: Errors that hold only if something is missing in all runs: place, rule, and the place of the scaler.
        seen: The places of all calls that a rule concerns.
        default_format: The format of autocast for CUDA, if the script sets one.
        default_low: The low default dtype, if the script sets one.
    """

    def __init__(self, facts: Facts, trace: Trace) -> None:
        self.facts = facts
        self.trace = trace
        self.found: set[tuple[Place, str]] = set()
        self._claims: list[tuple[Place, str, Value | None]] = []
        self.later: set[tuple[Place, str, Place]] = set()
        self.seen: set[Place] = set()
        self.default_format: str | None = None
        self.default_low: Low | None = None
        self._of_loops: dict[Place, set[Value]] = defaultdict(set)
        self._low_weights: set[Place] = set()
        self._gradients: dict[Value, Gradients] = {}
        self._unscaled_losses: list[Place] = []
        self._formats: dict[Value, set[str | None]] = defaultdict(set)
        self._steps: list[tuple[Value, Value]] = []
        self._saves: list[Save] = []
        self._low_losses: list[Place] = []
        self._trained_low: set[Value] = set()
        self._cuda: set[Place] = set()
        self._falls_back = False  # the script selects the CPU if there is no CUDA
        self._cuda_needed = False  # the script moves something to CUDA in any case
        self._scaled_last: Value | None = None  # the scaler of the last backward; None if it was not scaled
        self._zeroed: set[Value] = set()  # optimizers and models zeroed since the last scaled backward
        self._stepped_in: tuple[ast.AST, ...] = ()  # the loops around the last step of a scaler
        self._has_stepped = False
        self._has_autocast = False

    def report(self, rule: str, place: Place, scaler: Value | None = None) -> None:
        """Add an error; if a scaler causes it, only if the script uses nothing of it that torch's does not have."""
        self._claims.append((place, rule, scaler))

    def _here(self, node: ast.AST) -> Place:
        place = self.trace.place(node)
        self.seen.add(place)
        return place

    # --- regions and scalers ------------------------------------------------------------------------------------

    def entered(self, region: Autocast) -> None:
        """An autocast region was entered."""
        self.seen.add(region.place)
        if not region.is_on:
            return
        self._has_autocast = True
        if region.device == "cpu" and region.format == "fp16" and not self._falls_back:
            self.report("fp16-on-cpu", region.place)
        if region.device == "cuda" and not region.is_switched:
            self._cuda.add(region.place)

    def joined(self, node: ast.BoolOp, values: list[Value]) -> None:
        """``with`` was given contexts joined by ``and`` or ``or``."""
        left_out = list(zip(node.values, values, strict=True))[:-1]
        if not isinstance(node.op, ast.And) or not any(
            isinstance(each, (Autocast, Contexts)) for each in values
        ):
            return
        for expression, value in left_out:
            is_named = isinstance(expression, ast.Call) and _CONTEXTS.search(code(expression.func))
            if isinstance(value, (Autocast, Contexts)) or is_named:
                self.report("contexts-joined-by-and", self._here(node))

    def tested(self, node: ast.AST, test: ast.expr) -> None:
        """A test was made: remember whether the script has chosen the CPU because there is no CUDA."""
        if "is_available" in code(test) and re.search(r"""["']cpu["']""", code(node)):
            text = next((each for each in self.trace.asked if "is_available" in each), "")
            self._falls_back |= not self.trace.asked.get(text, (True,))[0]

    def moved(self, method: str, given: list[Value]) -> None:
        """Something was moved to a device: a script that needs CUDA does not fall back."""
        if method == "cuda":
            self._cuda_needed = True

    def scaler_made(self, scaler: Scaler, node: ast.AST, *, is_seen: bool) -> None:
        """A GradScaler was made; ``is_seen`` says whether the script shows its arguments."""
        self.seen.add(scaler.place)
        if not is_seen:
            self.facts.escaped.add(scaler.place)
        if scaler.is_on and scaler.device == "cuda" and not scaler.is_switched:
            self._cuda.add(scaler.place)

    def escaped(self, values: list[Value]) -> None:
        """Code that the script does not show may use these values."""
        for each in values:
            if isinstance(each, Scaler):
                self.facts.escaped.add(each.place)
            elif isinstance(each, Unknown) and each.options is not None:
                self.facts.handed |= each.options
            elif isinstance(each, (Const, Box)):
                self.facts.handed.add(each.place)
            elif isinstance(each, Instance) and each.kind is not None:
                self.facts.handed.add(each.kind.place)

    def state_read(self, scaler: Value) -> None:
        """``scaler.state_dict()`` was called."""
        self.facts.saved.add(scaler.place)

    def scale_read(self, scaler: Value) -> None:
        """The script has read the loss scale."""
        self._of(scaler).reads = True

    def _frames(self, place: Place) -> list[tuple[Scope, Place]]:
        """The scopes that are being executed, from outside in, each with the place that it has reached."""
        trace = self.trace
        scopes = [trace.modules[trace.program.path].names, *(scope for scope, _ in trace.frames)]
        return list(zip(scopes, [*(at for _, at in trace.frames), place], strict=True))

    def _of(self, scaler: Value) -> Gradients:
        return self._gradients.setdefault(scaler, Gradients())

    # --- gradients ----------------------------------------------------------------------------------------------

    def backward(self, loss: Value, node: ast.AST) -> None:
        """``loss.backward()``."""
        place = self._here(node)
        region = self.trace.regions[-1] if self.trace.regions else None
        if region is not None and region.is_on:
            self.report("backward-inside-autocast", place)
        for each in self._low_losses:
            self.report("loss-in-fp16", each)
        self._low_losses.clear()
        scaler = loss.scaler
        self._scaled_last = None
        if scaler is None:
            if "fp16" in loss.formats and not (region and region.device == "cpu"):
                self._unscaled_losses.append(place)
            return
        if isinstance(scaler, Scaler) and not scaler.is_on:
            if "fp16" in loss.formats:
                self._unscaled_losses.append(place)
            return
        now = self._of(scaler)
        self._scaled_last, self._zeroed = scaler, set()
        now.is_scaled, now.reads = True, False
        now.backwards += 1
        self.trace.tested.discard(scaler)
        self._formats[scaler] |= loss.formats

    def unscaled(self, scaler: Value, optimizer: Value, node: ast.AST) -> None:
        """``scaler.unscale_(optimizer)``."""
        place, now = self._here(node), self._of(scaler)
        now.unscaled.add(optimizer)
        before = now.divided.get(optimizer)
        if before is not None and before[1] < now.backwards:
            self.report("unscale-each-microbatch", place, scaler)
        now.divided[optimizer] = place, now.backwards

    def clipped(self, node: ast.AST, arguments: Arguments, of: Value | None = None) -> Value | None:
        """Gradients were clipped; the result is the scaler that scaled them."""
        place = self._here(node)
        values = reachable([*arguments[0], *arguments[1].values(), *([of] if of else [])])
        if any(each.scale_of is not None for each in values):
            return self._scaled_last
        for scaler, now in self._gradients.items():
            is_on = not isinstance(scaler, Scaler) or scaler.is_on
            if is_on and now.is_scaled and not now.reads and not self._is_unscaled(values, now):
                now.clips.append(_innermost(self._frames(place), scaler) or place)
        return self._scaled_last

    def _is_unscaled(self, values: list[Value], now: Gradients) -> bool:
        """Whether the gradients that are clipped may be those that were unscaled."""
        clipped = frozenset().union(*(each.modules for each in values))
        known = [each.modules for each in now.unscaled]
        if clipped and known and all(known) and not any(map(_may_be_another, clipped.union(*known))):
            parts = set(reachable(list(clipped)))  # an optimizer may hold all clipped modules or some of them
            return any(not parts.isdisjoint(reachable(list(each))) for each in known)
        return bool(known)

    def stepped(self, optimizer: Value, node: ast.AST) -> None:
        """``optimizer.step()``, not by a scaler."""
        place = self._here(node)
        for each in self._unscaled_losses:
            self.report("fp16-without-scaler", each)
        self._unscaled_losses.clear()
        for scaler, now in self._gradients.items():
            is_on = not isinstance(scaler, Scaler) or scaler.is_on
            is_scaled = is_on and self._scaled_last is scaler and optimizer not in self._zeroed
            if is_scaled and optimizer not in now.unscaled and not now.reads:
                self.report("step-on-scaled-gradients", place, scaler)
                for clip in now.clips:
                    self.report("clip-before-unscale", clip, scaler)
            now.clips.clear()
            now.divided.pop(optimizer, None)
        self._trained(optimizer)

    def scaler_stepped(self, scaler: Value, optimizer: Value, node: ast.AST) -> None:
        """``scaler.step(optimizer)``."""
        place, now = self._here(node), self._of(scaler)
        self.facts.stepped[scaler.place].add(optimizer.place)
        self._steps.append((scaler, optimizer))
        now.reads = False
        is_on = not isinstance(scaler, Scaler) or scaler.is_on
        if isinstance(scaler, Scaler) and not scaler.is_on:
            for each in self._unscaled_losses:
                self.report("fp16-without-scaler", each)
        self._unscaled_losses.clear()
        if is_on:
            for clip in now.clips:
                self.report("clip-before-unscale", clip, scaler)
        now.clips.clear()
        now.unscaled.discard(optimizer)
        now.divided.pop(optimizer, None)
        if isinstance(scaler, Scaler) and scaler.is_on:
            if self._formats[scaler] == {"bf16"}:
                self.report("scaler-with-bf16", scaler.place)
            inner, outer = scaler.loops, optimizer.loops
            if len(inner) > len(outer) and inner[: len(outer)] == outer:
                self._of_loops[scaler.place].add(scaler)
                if isinstance(
                    inner[-1], (ast.FunctionDef, ast.AsyncFunctionDef)
                ):  # the loop is in the function's caller
                    self.report("scaler-in-the-loop", scaler.place)
            self.later.add((place, "scaler-not-updated", scaler.place))
        self._stepped_in = tuple(self.trace.loops)
        self._trained(optimizer)

    def updated(self, scaler: Value) -> None:
        """``scaler.update()``."""
        self.facts.updated.add(scaler.place)
        now = self._of(scaler)
        now.unscaled.clear()
        now.is_scaled = False

    def zeroed(self, of: Value) -> None:
        """``zero_grad()`` of an optimizer or a model."""
        self._zeroed.add(of)
        for now in self._gradients.values():
            now.divided.pop(of, None)
            if of not in now.divided and not is_optimizer(of):
                now.divided.clear()
        self._unscaled_losses.clear()

    def scheduled(self, scheduler: Value, node: ast.AST) -> None:
        """``scheduler.step()``."""
        place = self._here(node)
        loops = tuple(self.trace.loops)
        for scaler, _ in self._steps[-1:]:
            is_on = isinstance(scaler, Scaler) and scaler.is_on
            if (
                is_on
                and loops
                and self._stepped_in == loops[: len(self._stepped_in)] != ()
                and scaler not in self.trace.tested
            ):
                self.report("scheduler-on-skipped-steps", place)

    # --- stored values ------------------------------------------------------------------------------------------

    def rounded(self, value: Value) -> None:
        """A tensor or a model was converted to a low format."""
        if value.low is not None:
            self.seen.add(value.low.place)

    def saved(self, node: ast.AST, values: list[Value]) -> None:
        """Something was saved."""
        place = self._here(node)
        contents = reachable(values)
        self.facts.saved.update(each.place for each in contents if isinstance(each, Scaler))
        states = [each.of for each in contents if isinstance(each, State) and each.of is not None]
        optimizers = {each for each in states if is_optimizer(each)}
        optimizers |= {each for each in states if any(each is stepped for _, stepped in self._steps)}
        if not optimizers:
            return
        boxes = [each for each in contents if isinstance(each, Box) and any(isinstance(item, State) and item.of in optimizers for item in each.items.values())]  # fmt: skip
        self._saves.append(Save(place, optimizers, boxes, self._frames(place)))
        for each in contents:
            is_trained = each in self._trained_low or (isinstance(each, State) and each.of in self._trained_low)  # fmt: skip
            is_trained = is_trained or isinstance(each, Optimizer) or self._is_trained(each, optimizers)
            if each.low is not None and not is_trained:
                self.report("checkpoint-rounded", each.low.place)

    def _is_trained(self, value: Value, optimizers: set[Value]) -> bool:
        """Whether the saved weights are low all along, since the optimizer trains them so."""
        of = value.of if isinstance(value, State) else value
        is_low = of is not None and of.low is not None
        return is_low and any(of in each.modules for each in optimizers) and not self._has_stepped

    def _trained(self, optimizer: Value) -> None:
        self._has_stepped = True
        for module in optimizer.modules:
            if module.low is None or module.is_frozen:
                continue
            self._trained_low.add(module)
            is_torch = isinstance(optimizer, Optimizer) and optimizer.name.startswith("torch.optim.")
            if is_torch:
                self._low_weights.add(module.low.place)

    def lost(self, node: ast.AST, given: list[Value]) -> None:
        """A loss was computed."""
        first = given[0] if given else None
        if first is not None and first.low is not None and first.low.format == "fp16" and first.modules and not self._has_autocast:  # fmt: skip
            self._low_losses.append(self._here(node))

    # --- the end ------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The run has ended."""
        if self._falls_back and not self._cuda_needed:
            for place in self._cuda:
                self.report("cuda-hard-coded", place)
        for place, scalers in self._of_loops.items():
            if len(scalers) > 1:
                self.report("scaler-in-the-loop", place)
        text = self.trace.program.text()
        if self._low_weights and not _KEEPS_MASTERS.search(text) and not _NO_TRAINING.search(text):
            for place in self._low_weights:
                self.report("low-weights-without-masters", place)
        on = [(scaler, optimizer) for scaler, optimizer in self._steps if isinstance(scaler, Scaler) and scaler.is_on]  # fmt: skip
        for save in self._saves:
            for scaler, optimizer in on:
                same = any(each is optimizer or each.place == optimizer.place for each in save.optimizers)
                if same:
                    self.later.add((save.place_for(scaler), "scaler-not-saved", scaler.place))
        self.found |= {(place, rule) for place, rule, scaler in self._claims if not _is_foreign(scaler)}


def _may_be_another(value: Value) -> bool:
    """Whether a value may be the same object as another value: an item of a container, or what a loop runs over."""
    return isinstance(value, Unknown) and (value.turn is not None or "[" in value.text)


def _is_foreign(scaler: Value | None) -> bool:
    """Whether a scaler that the script does not make has attributes that torch's GradScaler does not have."""
    return isinstance(scaler, Unknown) and not scaler.fields.keys() <= OF_SCALERS
