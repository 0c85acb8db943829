"""The rules: each checks a script for one precision error that raises no exception.

Sources: torch's documentation of torch.amp ("Automatic Mixed Precision examples": unscale before clipping, one scaler
for a run, its state in checkpoints), the issue reports behind these rules, and the uses that castwise's sessions
refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import libcst as cst

from castwise.bridges.scripts.lint.result import Fault
from castwise.bridges.scripts.lint.script import Script
from castwise.bridges.scripts.reading.torch_amp import (
    CASTS,
    FORMATS,
    asked_for_parameters,
    format_of,
    is_optimizer,
)
from castwise.bridges.scripts.reading.view import inside, root, text

_CLIPS = re.compile(r"(^|\.)clip_grad_(norm|value)_?$")
_LOOPS = (cst.For, cst.While)
_KEEPS_MASTERS = re.compile(
    r"castwise|deepspeed|apex|colossalai|accelerate|lightning|torchao|bitsandbytes|fairscale|megatron|transformer_engine|optimi\b"
)
"""Libraries whose optimizers keep fp32 values of low parameters, or that set precision themselves."""
_NO_TRAINING = re.compile(
    r"get_peft_model|LoraConfig|requires_grad_\(\s*False\s*\)|\.requires_grad\s*=\s*False"
)


def faults(code: str, path: Path) -> list[Fault]:
    """All faults in a script, at most one per line and rule.

    Raises:
        SyntaxError: The script cannot be parsed.
    """
    script = Script(code, path)
    return sorted({fault for rule in RULES for fault in rule(script)})


def fp16_on_a_cpu(script: Script) -> Iterator[Fault]:
    """fp16 autocast for the CPU."""
    for call in script.autocasts:
        if call.device_type == "cpu" and call.format == "fp16" and call.is_on:
            yield script.fault(
                call.node,
                "fp16-on-cpu",
                "CPUs compute fp16 by converting to fp32 and back, and keep the small range of fp16: gradients below 6e-8 become zero",
                'torch.autocast("cpu", dtype=torch.bfloat16); castwise doctor measures how fast this CPU is in each format',
            )


def device_that_is_not_there(script: Script) -> Iterator[Fault]:
    """Autocast or a scaler for CUDA in a script that also runs without CUDA."""
    falls_back = any(
        isinstance(node, (cst.IfExp, cst.If))
        and "is_available" in script.code(node.test)
        and re.search(r"""["']cpu["']""", script.code(node))
        for node in script.nodes
    )
    if not falls_back:
        return
    for call in (*script.autocasts, *script.scalers.values()):
        around = [outer for outer in script.around(call.node) if isinstance(outer, (cst.If, cst.IfExp))]
        chosen = any(re.search(r"cuda|device|gpu", script.code(outer.test)) for outer in around)
        if call.device_type == "cuda" and not chosen and call.is_on:
            what = "autocast" if call.is_autocast else "GradScaler"
            yield script.fault(
                call.node,
                "cuda-hard-coded",
                f"when the script falls back to the CPU, this {what} for CUDA has no effect: everything runs in fp32",
                f"torch.amp.{what}(device_type, ...) with the type of the device that was chosen: device_type = torch.device(device).type",
            )


def scaler_with_bf16(script: Script) -> Iterator[Fault]:
    """A loss scale although everything is bf16, whose range is fp32's."""
    if {call.format for call in script.autocasts} != {"bf16"}:
        return
    for name, call in script.scalers.items():
        if call.is_on and script.methods(name, "scale"):
            yield script.fault(
                call.node,
                "scaler-with-bf16",
                "bf16 has fp32's range, so a loss scale gains nothing; it costs a check of all gradients and, until a scale is "
                "found, skipped steps",
                "leave the GradScaler out: loss.backward(), optimizer.step()",
            )


def clipping_before_unscale(script: Script) -> Iterator[Fault]:
    """Gradients clipped while the loss scale is in them."""
    for name, made in script.scalers.items():
        if not made.is_on:
            continue
        steps, scales = script.methods(name, "step"), script.methods(name, "scale")
        unscales = script.methods(name, "unscale_")
        for clip, _ in script.calls:
            if not _CLIPS.search(script.code(clip.func)):
                continue
            here, at = script.function(clip), script.position(clip)
            before = [s for s in scales if script.function(s) == here and script.position(s) < at]
            after = [s for s in steps if script.function(s) == here and script.position(s) > at]
            freed = [u for u in unscales if script.function(u) == here and script.position(u) < at]
            between = before and any(script.position(u) > script.position(before[-1]) for u in freed)
            if before and after and not between:
                yield script.fault(
                    clip,
                    "clip-before-unscale",
                    "gradients are still multiplied by the loss scale (65536 at first) here, so nearly all are clipped, and after "
                    "unscaling their norm is too small by the factor of the loss scale",
                    f"{name}.unscale_(optimizer) before clipping; with castwise: amp.step(optimizer, max_norm=...)",
                )


def scaler_never_updated(script: Script) -> Iterator[Fault]:
    """A scaler whose scale is never updated."""
    for name, made in script.scalers.items():
        steps = script.methods(name, "step")
        if steps and made.is_on and not script.methods(name, "update") and not _handed_on(script, name):
            yield script.fault(
                steps[0],
                "scaler-not-updated",
                f"{name}.update() is never called: the loss scale never changes, and while it is too large every step is skipped",
                f"{name}.update() after {name}.step(optimizer)",
            )


def step_on_scaled_gradients(script: Script) -> Iterator[Fault]:
    """``optimizer.step()`` instead of ``scaler.step(optimizer)``."""
    for name, made in script.scalers.items():
        scales = script.methods(name, "scale")
        quiet = script.methods(name, "step") or script.methods(name, "unscale_") or _handed_on(script, name)
        if not scales or quiet or not made.is_on:
            continue
        optimizers = {
            script.code(target)
            for call, origin in script.calls
            if is_optimizer(origin)
            for target in script.targets(script.parent(call))
        }
        for optimizer in sorted(optimizers):
            for step in script.methods(optimizer, "step"):
                if script.function(step) not in map(script.function, scales):
                    continue
                yield script.fault(
                    step,
                    "step-on-scaled-gradients",
                    f"the gradients come from {name}.scale(loss), so this update is too large by the factor of the loss scale, and "
                    f"infinities reach the weights",
                    f"{name}.step({optimizer}); {name}.update()",
                )


def scaler_made_in_the_loop(script: Script) -> Iterator[Fault]:
    """A scaler that is created anew in every step."""
    for name, made in script.scalers.items():
        for outer in script.around(made.node):
            if isinstance(outer, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
                break
            scales = set(script.methods(name, "scale"))
            if isinstance(outer, _LOOPS) and not scales.isdisjoint(inside(outer)):
                inner = [node for node in inside(outer.body) if isinstance(node, _LOOPS)]
                if any(not scales.isdisjoint(inside(loop)) for loop in inner):
                    break  # a new scaler per epoch or run is fine
                yield script.fault(
                    made.node,
                    "scaler-in-the-loop",
                    "every step makes a new scaler, which starts at a loss scale of 65536, so the right scale is never found",
                    f"{name} = torch.amp.GradScaler(...) once, before the loop",
                )
                break


def scaler_not_saved(script: Script) -> Iterator[Fault]:
    """Checkpoints of optimizers without the scaler's state."""
    for name, made in script.scalers.items():
        if not made.is_on or _handed_on(script, name) or not script.methods(name, "step"):
            continue
        if script.methods(name, "state_dict"):
            continue
        for call, origin in script.calls:
            saves = origin == "torch.save"
            if saves and re.search(r"\boptim\w*(\.\w+)*\.state_dict\(\)", script.code(call)):
                yield script.fault(
                    call,
                    "scaler-not-saved",
                    f"the optimizer is saved, but {name} is not: a resumed run starts at a loss scale of 65536 and skips steps until "
                    "the right scale is found again",
                    f'{{..., "scaler": {name}.state_dict()}}, and {name}.load_state_dict(...) when the run resumes',
                )
                break


def low_weights_without_masters(script: Script) -> Iterator[Fault]:
    """A model stored in bf16 or fp16 that an optimizer of torch updates without masters."""
    if _KEEPS_MASTERS.search(script.imports) or _NO_TRAINING.search(script.text):
        return
    low = {(name, script.function(node)): (node, kind) for name, node, kind in _low_models(script)}
    for call, origin in script.calls:
        if not is_optimizer(origin) or not call.args:
            continue
        steppers = [*map(script.code, script.targets(script.parent(call))), *script.scalers]
        if not any(script.methods(each, "step") for each in steppers):
            continue
        for model in map(script.code, asked_for_parameters(call.args[0].value)):
            at, kind = low.get((model, script.function(call)), (None, ""))
            if at is None:
                continue
            eps = ", and Adam's eps of 1e-8 is zero in fp16" if kind == "fp16" and "Adam" in origin else ""
            yield script.fault(
                at,
                "low-weights-without-masters",
                f"{model!r} is stored in {kind} and trained without masters: updates below {'1/256' if kind == 'bf16' else '1/2048'} of a weight "
                f"are rounded away{eps}",
                f'keep it in fp32 and use autocast; or castwise.Amp("{kind}-master") and amp.prepare({model}, optimizer), which keeps '
                "fp32 masters",
            )


def loss_in_fp16(script: Script) -> Iterator[Fault]:
    """A loss computed from the outputs of a model that was converted to fp16."""
    low = {(name, script.function(node)) for name, node, kind in _low_models(script) if kind == "fp16"}
    if not low or script.autocasts or _KEEPS_MASTERS.search(script.imports):
        return
    for call, origin in script.calls:
        name = script.code(call.func)
        is_loss = re.match(
            r"torch\.nn\.functional\.(cross_entropy|nll_loss|mse_loss|kl_div|binary_cross_entropy\w*|l1_loss|smooth_l1_loss)$",
            origin,
        )
        is_loss = is_loss or re.search(r"(^|[._])(criterion|loss_fn|loss_func)$", name)
        first = call.args[0].value if call.args else None
        if (
            is_loss
            and isinstance(first, cst.Call)
            and (script.code(first.func), script.function(call)) in low
        ):
            yield script.fault(
                call,
                "loss-in-fp16",
                "outputs are fp16, and so the loss is computed in fp16: its sums overflow above 65504, and its small terms become zero",
                f"{name}({script.code(first)}.float(), ...)",
            )


def _low_models(script: Script) -> Iterator[tuple[str, cst.Call, str]]:
    """Variables that hold modules with low weights: name, place and format. Modules converted back to fp32 are left out."""
    optimized = {script.code(model) for model in asked_for_parameters(script.module)}
    for name in sorted(optimized):
        if re.search(
            rf"\b{re.escape(name)}\.float\(\)|\b{re.escape(name)}\.to\(\s*(dtype\s*=\s*)?torch\.float32",
            script.text,
        ):
            continue
        for node, _ in script.calls:
            if not _is_unconditional(script, node):
                continue
            kind = _made_low(script, node)
            if kind is None:
                continue
            user = script.parent(node)
            assigned = name in map(script.code, script.targets(user))
            of = isinstance(node.func, cst.Attribute) and script.code(node.func.value) == name
            if assigned or (of and isinstance(user, cst.Expr)):
                yield name, node, kind


def _made_low(script: Script, call: cst.Call) -> str | None:
    """The format to which a call (``.half()``, ``.to(...)``, ``from_pretrained(dtype=...)``) converts a module's weights."""
    if not isinstance(call.func, cst.Attribute):
        return None
    method = call.func.attr.value
    if method in CASTS and not call.args:
        return CASTS[method]
    named = {each.keyword.value: each.value for each in call.args if each.keyword is not None}
    if method in ("to", "from_pretrained"):
        given = [each.value for each in call.args if each.keyword is None] if method == "to" else []
        given += [named[name] for name in ("torch_dtype", "dtype") if name in named]
        formats = (format_of(script, each) or FORMATS.get(f"torch.{text(each)}") for each in given)
        return next(filter(None, formats), None)
    if method in ("cuda", "train", "eval", "to_empty", "compile") and isinstance(call.func.value, cst.Call):
        return _made_low(script, call.func.value)
    return None


def _is_unconditional(script: Script, node: cst.CSTNode) -> bool:
    return not any(isinstance(outer, (cst.If, cst.IfExp, cst.Try)) for outer in script.around(node))


def _handed_on(script: Script, name: str) -> bool:
    """Whether other code may use a scaler: it is passed to a function, returned, or stored elsewhere."""
    if name.startswith("self."):
        return True
    for node in script.nodes:
        if isinstance(node, cst.Name) and node.value == name and root(node) is node:
            user = script.parent(node)
            if isinstance(user, (cst.Arg, cst.Return, cst.DictElement, cst.Element)) or (
                isinstance(user, cst.Assign) and user.value is node
            ):
                return True
    return False


RULES = (
    fp16_on_a_cpu, device_that_is_not_there, scaler_with_bf16, clipping_before_unscale, scaler_never_updated,
    step_on_scaled_gradients, scaler_made_in_the_loop, scaler_not_saved, low_weights_without_masters, loss_in_fp16,
)  # fmt: skip
