"""The rules: each looks in an abstract run for one precision error that raises no exception.

Sources: torch's documentation of torch.amp ("Automatic Mixed Precision examples": unscale before clipping, one scaler
for a run, its state in checkpoints), the issue reports behind these rules, and the uses that castwise's sessions
refuse.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Literal, NamedTuple

from castwise.bridges.scripts.lint.values import (
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

if TYPE_CHECKING:
    from castwise.bridges.scripts.lint.library import Library
    from castwise.bridges.scripts.lint.machine import Arguments, Machine
    from castwise.bridges.scripts.lint.program import Program

Severity = Literal["error", "warning"]


class Rule(NamedTuple):
    """What a finding of a rule says.

    Attributes:
        severity: ``error`` if the training or a checkpoint is wrong, ``warning`` if it is worse or slower than it
            could be.
        why: The effect.
        instead: What to write.
    """

    severity: Severity
    why: str
    instead: str


RULES = {
    "fp16-on-cpu": Rule(
        "warning",
        "CPUs compute fp16 by converting to fp32 and back, and keep the small range of fp16: gradients below 6e-8 become zero",
        'torch.autocast("cpu", dtype=torch.bfloat16); castwise doctor measures how fast this CPU is in each format',
    ),
    "cuda-hard-coded": Rule(
        "warning",
        "when the script falls back to the CPU, autocast and GradScaler for CUDA have no effect: everything runs in fp32",
        "torch.amp.autocast(device_type, ...) and torch.amp.GradScaler(device_type) with the type of the chosen device",
    ),
    "scaler-with-bf16": Rule(
        "warning",
        "bf16 has fp32's range, so a loss scale gains nothing; it costs a check of all gradients and, until a scale is found, "
        "skipped steps",
        "leave the GradScaler out, or make it with enabled=False, where autocast uses bf16: loss.backward(), optimizer.step()",
    ),
    "clip-before-unscale": Rule(
        "error",
        "gradients are still multiplied by the loss scale (65536 at first) here, so nearly all are clipped, and after "
        "unscaling their norm is too small by the factor of the loss scale",
        "scaler.unscale_(optimizer) before clipping; with castwise: amp.step(optimizer, max_norm=...)",
    ),
    "scaler-not-updated": Rule(
        "error",
        "the scaler's update() is never called: the loss scale never changes, and while it is too large every step is skipped",
        "scaler.update() after scaler.step(optimizer)",
    ),
    "step-on-scaled-gradients": Rule(
        "error",
        "the gradients come from a loss that the scaler has scaled, so this update is too large by the factor of the loss scale, "
        "and infinities reach the weights",
        "scaler.step(optimizer); scaler.update()",
    ),
    "scaler-in-the-loop": Rule(
        "error",
        "the loop makes a new scaler each time, while the optimizer stays: the loss scale starts again at 65536, and steps are skipped "
        "until the right scale is found again",
        "torch.amp.GradScaler(...) once, before the loop",
    ),
    "scaler-not-saved": Rule(
        "warning",
        "the optimizer is saved, but the scaler is not: a resumed run starts at a loss scale of 65536 and skips steps until the right "
        "scale is found again",
        '{..., "scaler": scaler.state_dict()}, and scaler.load_state_dict(...) when the run resumes',
    ),
    "scheduler-on-skipped-steps": Rule(
        "warning",
        "the scheduler moves in every iteration, also when the scaler skips the step because of an overflow: the learning rate runs "
        "ahead of the updates",
        "scale = scaler.get_scale() before scaler.update(), and the scheduler's step() only if scaler.get_scale() >= scale; with "
        "castwise: if amp.step(optimizer): scheduler.step()",
    ),
    "backward-inside-autocast": Rule(
        "warning",
        "backward runs inside the autocast region: operators of the backward that are not replayed from the forward are cast once more; "
        "torch advises against it",
        "end the with block after the loss is computed, and call backward outside of it",
    ),
    "fp16-without-scaler": Rule(
        "error",
        "the forward ran under fp16 autocast and the loss is not scaled: gradients below 6e-8 become zero in fp16",
        "scaler = torch.amp.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); or autocast in bf16",
    ),
    "unscale-each-microbatch": Rule(
        "error",
        "gradients that are accumulated over several microbatches are unscaled more than once: what was accumulated before is divided "
        "by the loss scale again",
        "unscale_ and clip only in the iteration that calls scaler.step(optimizer)",
    ),
    "checkpoint-rounded": Rule(
        "error",
        "the checkpoint holds the optimizer's state, to resume from, but weights that were rounded here: each resume loses the small "
        "updates since",
        "save the fp32 weights for resuming; export a low copy to a file of its own",
    ),
    "contexts-joined-by-and": Rule(
        "error",
        "`a and b` gives one of the two contexts, and only that one is entered: the other has no effect",
        "with a, b:",
    ),
    "low-weights-without-masters": Rule(
        "error",
        "the weights are stored in a low format and trained without masters: updates below 1/256 (bf16) or 1/2048 (fp16) of a weight "
        "are rounded away, and Adam's eps of 1e-8 is zero in fp16",
        'keep them in fp32 and use autocast; or castwise.Amp("bf16-master") and amp.prepare(model, optimizer), which keeps fp32 masters',
    ),
    "loss-in-fp16": Rule(
        "error",
        "outputs are fp16, and so the loss is computed in fp16: its sums overflow above 65504, and its small terms become zero",
        "the loss of outputs.float()",
    ),
    "unused-precision-option": Rule(
        "warning",
        "this option of precision is parsed, but nothing reads it: the script runs in the same precision with and without it",
        "use the option where autocast and GradScaler are made, or remove it",
    ),
}
_KEEPS_MASTERS = re.compile(
    r"^\s*(?:from|import)\s+[^\n]*(castwise|deepspeed|apex|colossalai|accelerate|lightning|torchao|bitsandbytes|fairscale|megatron|transformer_engine|optimi\b)",
    re.MULTILINE,
)
"""Imports of libraries whose optimizers keep fp32 values of low parameters, or that set precision themselves."""
_NO_TRAINING = re.compile(r"get_peft_model|\blora|adapter|freeze|frozen", re.IGNORECASE)
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
        """Where the scaler's state could be added: the innermost code that can reach the scaler."""
        for box in self.boxes:
            if box.maker is not None and _reaches(box.maker, scaler):
                return box.place
        for scope, at in reversed(self.frames):
            if _reaches(scope, scaler):
                return at
        return self.place


def _reaches(scope: Scope, scaler: Value) -> bool:
    """Whether code in a scope can use a scaler: by a name, or through what a name holds."""
    here: Scope | None = scope
    while here is not None:
        if any(each is scaler for each in reachable(list(here.values.values()))):
            return True
        here = here.outer
    return False


class Rules:
    """Follows the uses of mixed precision in one run, and reports errors.

    Args:
        facts: What all runs show; this run adds to it.
        program: The files of the script.

    Attributes:
        found: The errors: place and rule.
        later: Errors that hold only if something is missing in all runs: place, rule, and the place of the scaler.
        seen: The places of all calls that a rule concerns.
        default_format: The format of autocast for CUDA, if the script sets one.
        default_low: The low default dtype, if the script sets one.
    """

    library: Library

    def __init__(self, facts: Facts, program: Program) -> None:
        self.facts = facts
        self.program = program
        self.found: set[tuple[Place, str]] = set()
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
        self._zeroed = set()
        self._low_losses: list[Place] = []
        self._trained_low: set[Value] = set()
        self._cuda: set[Place] = set()
        self._falls_back = False
        self._has_autocast = False

    @property
    def machine(self) -> Machine:
        """The run."""
        return self.library.machine

    def report(self, rule: str, place: Place) -> None:
        """Add an error."""
        self.found.add((place, rule))

    def _here(self, node: ast.AST) -> Place:
        place = self.machine.place(node)
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
            text = next((each for each in self.machine.asked if "is_available" in each), "")
            self._falls_back |= not self.machine.asked.get(text, (True,))[0]

    def moved(self, method: str, given: list[Value]) -> None:
        """Something was moved to a device: a script that needs CUDA does not fall back."""
        if method == "cuda":
            self._cuda_needed = True

    _cuda_needed = False

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
            elif isinstance(each, Const):
                self.facts.handed.add(each.place)
            elif isinstance(each, Instance) and each.kind is not None:
                self.facts.handed.add(each.kind.place)

    def state_read(self, scaler: Value) -> None:
        """``scaler.state_dict()`` was called."""
        self.facts.saved.add(scaler.place)

    def scale_read(self, scaler: Value) -> None:
        """The script has read the loss scale."""
        self._of(scaler).reads = True

    def _of(self, scaler: Value) -> Gradients:
        return self._gradients.setdefault(scaler, Gradients())

    # --- gradients ----------------------------------------------------------------------------------------------

    def backward(self, loss: Value, node: ast.AST) -> None:
        """``loss.backward()``."""
        place = self._here(node)
        region = self.machine.regions[-1] if self.machine.regions else None
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
        self._formats[scaler] |= loss.formats

    def unscaled(self, scaler: Value, optimizer: Value, node: ast.AST) -> None:
        """``scaler.unscale_(optimizer)``."""
        place, now = self._here(node), self._of(scaler)
        now.unscaled.add(optimizer)
        before = now.divided.get(optimizer)
        if before is not None and before[1] < now.backwards:
            self.report("unscale-each-microbatch", place)
        now.divided[optimizer] = place, now.backwards

    def clipped(self, node: ast.AST, arguments: Arguments, of: Value | None = None) -> None:
        """Gradients were clipped."""
        place = self._here(node)
        values = reachable([*arguments[0], *arguments[1].values(), *([of] if of else [])])
        if any(each.scale_of is not None for each in values):
            return
        for scaler, now in self._gradients.items():
            is_on = not isinstance(scaler, Scaler) or scaler.is_on
            if is_on and now.is_scaled and not now.reads and not self._is_unscaled(values, now):
                now.clips.append(place)

    def _is_unscaled(self, values: list[Value], now: Gradients) -> bool:
        """Whether the gradients that are clipped may be those that were unscaled."""
        clipped = frozenset().union(*(each.modules for each in values))
        known = [each.modules for each in now.unscaled]
        if clipped and known and all(known):
            return any(clipped & each for each in known)
        return bool(known)

    _scaled_last: Value | None = None
    _zeroed: set[Value]

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
                if optimizer.place not in self.facts.stepped.get(scaler.place, ()):
                    self.report("step-on-scaled-gradients", place)
                for clip in now.clips:
                    self.report("clip-before-unscale", clip)
            now.clips.clear()
            now.divided.pop(optimizer, None)
        self._trained(optimizer)

    def scaler_stepped(self, scaler: Value, optimizer: Value, node: ast.AST) -> None:
        """``scaler.step(optimizer)``."""
        place, now = self._here(node), self._of(scaler)
        self.facts.stepped[scaler.place].add(optimizer.place)
        self._steps.append((scaler, optimizer))
        self.machine.tested.discard(scaler)
        now.reads = False
        is_on = not isinstance(scaler, Scaler) or scaler.is_on
        if isinstance(scaler, Scaler) and not scaler.is_on:
            for each in self._unscaled_losses:
                self.report("fp16-without-scaler", each)
        self._unscaled_losses.clear()
        if is_on:
            for clip in now.clips:
                self.report("clip-before-unscale", clip)
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
                ):  # its caller makes the loop
                    self.report("scaler-in-the-loop", scaler.place)
            self.later.add((place, "scaler-not-updated", scaler.place))
        self._stepped_in = tuple(self.machine.loops)
        self._trained(optimizer)

    _stepped_in: tuple[ast.AST, ...] = ()

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
            if of not in now.divided and not self.library.is_optimizer(of):
                now.divided.clear()
        self._unscaled_losses.clear()

    def scheduled(self, scheduler: Value, node: ast.AST, arguments: Arguments) -> None:
        """``scheduler.step()``."""
        place = self._here(node)
        loops = tuple(self.machine.loops)
        for scaler, _ in self._steps[-1:]:
            is_on = isinstance(scaler, Scaler) and scaler.is_on
            if (
                is_on
                and loops
                and self._stepped_in == loops[: len(self._stepped_in)] != ()
                and scaler not in self.machine.tested
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
        optimizers = {each for each in states if self.library.is_optimizer(each)}
        optimizers |= {each for each in states if any(each is stepped for _, stepped in self._steps)}
        if not optimizers:
            return
        boxes = [each for each in contents if isinstance(each, Box) and any(isinstance(item, State) and item.of in optimizers for item in each.items.values())]  # fmt: skip
        frames = [(scope, at) for (scope, _), at in zip(self.machine.frames, [*(at for _, at in self.machine.frames[1:]), place], strict=False)]  # fmt: skip
        if self.machine.frames:
            frames.insert(
                0, (self.machine.modules[self.machine.program.path].names, self.machine.frames[0][1])
            )
        self._saves.append(Save(place, optimizers, boxes, frames))
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

    _has_stepped = False

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
        text = self.program.text()
        if self._low_weights and not _KEEPS_MASTERS.search(text) and not _NO_TRAINING.search(text):
            for place in self._low_weights:
                self.report("low-weights-without-masters", place)
        on = [(scaler, optimizer) for scaler, optimizer in self._steps if isinstance(scaler, Scaler) and scaler.is_on]  # fmt: skip
        for save in self._saves:
            for scaler, optimizer in on:
                same = any(each is optimizer or each.place == optimizer.place for each in save.optimizers)
                if same:
                    self.later.add((save.place_for(scaler), "scaler-not-saved", scaler.place))
