"""A script, and what of it the rules of a lint look at."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from castwise.bridges.scripts.migrate.torch_loop import AUTOCAST, SCALER
from castwise.bridges.scripts.migrate.view import View

BF16 = {"torch.bfloat16"}
FP16 = {"torch.float16", "torch.half"}


class Script:
    """A script, and what of it the rules look at."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.calls = [node for node in view.nodes if isinstance(node, cst.Call)]
        self.named = [(call, view.origin(call.func) or "") for call in self.calls]
        self.autocasts = [call for call, name in self.named if name in AUTOCAST]
        self.scalers = self._scalers()
        self.modules = {
            name
            for node in view.nodes
            if isinstance(node, (cst.Import, cst.ImportFrom))
            for name in [view.code(node)]
        }

    def _scalers(self) -> Mapping[str, cst.Call]:
        """GradScalers by the name that they are bound to, ``self.scaler`` too; a name of several is nobody's."""
        found: dict[str, list[cst.Call]] = {}
        for call, name in self.named:
            target = self.view.parent(call)
            if name in SCALER and isinstance(target, cst.Assign) and len(target.targets) == 1:
                found.setdefault(self.view.code(target.targets[0].target), []).append(call)
        return {name: calls[0] for name, calls in found.items() if len(calls) == 1}

    def methods(self, of: str, method: str) -> list[cst.Call]:
        """Calls of a method of what a name stands for."""
        wanted = f"{of}.{method}"
        return [call for call in self.calls if self.view.code(call.func) == wanted]

    def argument(self, call: cst.Call, name: str, place: int | None = None) -> cst.BaseExpression | None:
        """What a call gives for a parameter, by its name or place."""
        for at, each in enumerate(call.args):
            if each.star:
                return None
            if (each.keyword is not None and each.keyword.value == name) or (
                each.keyword is None and at == place
            ):
                return each.value
        return None

    def has_stars(self, call: cst.Call) -> bool:
        """Whether it gives arguments that are not written out."""
        return any(each.star for each in call.args)

    def device(self, call: cst.Call) -> str | None:
        """The device type that an autocast or a scaler is for, where it is written out."""
        known = {**AUTOCAST, **SCALER}.get(self.view.origin(call.func) or "")
        if known is not None:
            return known
        place = self.argument(call, "device_type", 0) or self.argument(call, "device", 0)
        text = place.evaluated_value if isinstance(place, cst.SimpleString) else None
        return text if isinstance(text, str) else None

    def dtype(self, node: cst.BaseExpression | None) -> str | None:
        """``bf16`` or ``fp16`` where an expression is torch's dtype of that name."""
        name = None if node is None else self.view.origin(node)
        text = node.evaluated_value if isinstance(node, cst.SimpleString) else None
        if name in BF16 or text in ("bfloat16", "bf16"):
            return "bf16"
        return "fp16" if name in FP16 or text in ("float16", "fp16") else None

    def autocast_dtype(self, call: cst.Call) -> str | None:
        """The format of an autocast, where it is written out or its device's default."""
        name = self.view.origin(call.func) or ""
        given = self.argument(call, "dtype", 1 if AUTOCAST.get(name) is None else None)
        if given is not None or self.has_stars(call):
            return self.dtype(given)
        return {"cpu": "bf16", "cuda": "fp16"}.get(self.device(call) or "")

    def is_on(self, call: cst.Call) -> bool:
        """Whether nothing can switch it off."""
        enabled = self.argument(call, "enabled")
        return not self.has_stars(call) and (enabled is None or self.view.code(enabled) == "True")

    def line(self, node: cst.CSTNode) -> int:
        """The line that something begins on."""
        return self.view.line(node)

    def function(self, node: cst.CSTNode) -> int:
        """What tells the function apart that something is in."""
        return id(self.view.function(node))
