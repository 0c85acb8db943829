"""Hand-written torch.amp, name by name: ``torch.cuda.amp.autocast`` and its like become castwise's.

castwise's names are supersets of torch's, so a call keeps its meaning once what ``torch.cuda.amp`` takes for granted
(the device, fp16) is written out.
"""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from castwise.migrate.edits import Edits
from castwise.migrate.view import View

__all__ = ["AUTOCAST", "SCALER", "autocast_calls", "rewrite_names", "scaler_calls"]

AUTOCAST: Mapping[str, str | None] = {
    "torch.cuda.amp.autocast": "cuda",
    "torch.cuda.amp.autocast_mode.autocast": "cuda",
    "torch.cpu.amp.autocast": "cpu",
    "torch.cpu.amp.autocast_mode.autocast": "cpu",
    "torch.amp.autocast": None,
    "torch.amp.autocast_mode.autocast": None,
    "torch.autocast": None,
}
"""Names of autocast, with the device that each is for; None where its first argument says so."""
SCALER: Mapping[str, str | None] = {
    "torch.cuda.amp.GradScaler": "cuda",
    "torch.cuda.amp.grad_scaler.GradScaler": "cuda",
    "torch.cpu.amp.GradScaler": "cpu",
    "torch.cpu.amp.grad_scaler.GradScaler": "cpu",
    "torch.amp.GradScaler": None,
    "torch.amp.grad_scaler.GradScaler": None,
    "torch.GradScaler": None,
}
_CUSTOM: Mapping[str, str | None] = {
    f"torch.{module}{name}": device
    for module, device in (("cuda.amp.", "cuda"), ("cuda.amp.autocast_mode.", "cuda"), ("amp.", None), ("amp.autocast_mode.", None))
    for name in ("custom_fwd", "custom_bwd")
}  # fmt: skip
_ALL = {*AUTOCAST, *SCALER, *_CUSTOM}
_LOW = {"cuda": "float16", "cpu": "bfloat16"}
_SHARDED = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"


def autocast_calls(view: View) -> list[cst.Call]:
    """Calls of torch's autocast, in the order of the script."""
    return [node for node in view.nodes if isinstance(node, cst.Call) and view.origin(node.func) in AUTOCAST]


def scaler_calls(view: View) -> list[cst.Call]:
    """Calls that make one of torch's scalers."""
    return [node for node in view.nodes if isinstance(node, cst.Call) and view.origin(node.func) in SCALER]


def rewrite_names(edits: Edits, done: set[cst.CSTNode]) -> None:
    """Rewrite every use of a name of torch.amp that is understood, and list the others.

    Args:
        edits: Where the changes go.
        done: Calls that were rewritten otherwise.
    """
    view = edits.view
    uses = [node for node in view.nodes if _is_use(view, node)]
    as_value = [node for node in uses if view.origin(node) in SCALER and not _is_plain_use(view, node)]
    for node in uses:
        origin = view.origin(node)
        call = view.parent(node)
        if call in done:
            edits.mark(node)
        elif origin is None:
            names = " or ".join(sorted(filter(None, view.origins(node))))
            edits.left(
                node, f"{view.code(node)} may be {names} or something else, depending on what ran before"
            )
        elif origin in SCALER and as_value:
            reason = (
                "used as a class or a value" if node in as_value else f"see line {view.line(as_value[0])}"
            )
            edits.left(
                node,
                f"{view.code(node)} stays torch's: {reason}. castwise.GradScaler is a subclass of torch.amp.GradScaler; "
                "where that is enough, name it here by hand",
            )
        elif isinstance(call, cst.Call) and call.func is node:
            _rewrite_call(edits, call, origin)
        elif isinstance(call, cst.Decorator) and origin in _CUSTOM:
            _rewrite_decorator(edits, node, origin)
        elif origin in SCALER:
            edits.replace(node, edits.use("GradScaler"))
            edits.mark(node)
        else:
            edits.left(
                node, f"{view.code(node)} is not called here, so what it is called with cannot be seen"
            )
    _list_neighbours(edits)


def _is_use(view: View, node: cst.CSTNode) -> bool:
    return isinstance(node, (cst.Name, cst.Attribute)) and bool(view.origins(node) & _ALL)


def _is_plain_use(view: View, node: cst.CSTNode) -> bool:
    """Whether a class is called here, or stands in an annotation."""
    parent = view.parent(node)
    if isinstance(parent, cst.Call) and parent.func is node:
        return True
    return any(isinstance(outer, cst.Annotation) for outer in view.around(node))


def _rewrite_call(edits: Edits, call: cst.Call, origin: str) -> None:
    if origin in AUTOCAST:
        device, name, low = AUTOCAST[origin], "autocast", True
    elif origin in SCALER:
        device, name, low = SCALER[origin], "GradScaler", False
    else:
        device, name, low = _CUSTOM[origin], origin.rpartition(".")[2], False
    stars = any(argument.star for argument in call.args)
    if device is not None and stars:
        edits.left(
            call, f"{edits.view.code(call.func)} is called with * or **, so its arguments cannot be seen"
        )
        return
    if name.startswith("custom_") and any(argument.keyword is None for argument in call.args):
        edits.left(call, f"{edits.view.code(call.func)} is given a function here, not used as a decorator")
        return
    head = edits.use(name)

    def change(updated: cst.Call) -> cst.Call:
        args = list(updated.args)
        if device is not None and low:
            args = _autocast_args(edits.view, args, device)
        elif device is not None and name == "GradScaler" and (device != "cuda" or _has_positional(args)):
            args = [_argument(f'"{device}"'), *args]
        elif device is not None and name.startswith("custom_"):
            args = [_argument(f'"{device}"', "device_type"), *args]
        return updated.with_changes(func=head, args=args)

    edits.replace(call, change)
    edits.mark(call.func)


def _has_positional(args: list[cst.Arg]) -> bool:
    return any(argument.keyword is None for argument in args)


def _autocast_args(view: View, args: list[cst.Arg], device: str) -> list[cst.Arg]:
    """Arguments of ``torch.cuda.amp.autocast(enabled, dtype, cache_enabled)`` as castwise.autocast takes them."""
    order = ("enabled", "dtype", "cache_enabled")
    given = {
        argument.keyword.value if argument.keyword else order[i]: argument for i, argument in enumerate(args)
    }
    dtype = given.pop("dtype", None)
    low = _LOW[device]
    written = f"torch.{low}" if _has_torch(view) else {"float16": '"fp16"', "bfloat16": '"bf16"'}[low]
    first = _argument(written) if dtype is None else cst.Arg(dtype.value)
    keyword = [_keep(argument, name) for name, argument in given.items()]
    return [first, *keyword, _argument(f'"{device}"', "device_type")]


def _keep(argument: cst.Arg, name: str) -> cst.Arg:
    """The argument under its name; one that has it already stays as it is written."""
    if argument.keyword is not None:
        return argument
    return _argument("x", name).with_changes(value=argument.value)


def _argument(value: str, keyword: str | None = None) -> cst.Arg:
    expression = cst.parse_expression(value)
    if keyword is None:
        return cst.Arg(expression)
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(expression, keyword=cst.Name(keyword), equal=equal)


def _has_torch(view: View) -> bool:
    """Whether the module has ``import torch``."""
    for line in view.module.body:
        for small in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.Import):
                for alias in small.names:
                    if alias.evaluated_alias is None and alias.evaluated_name.partition(".")[0] == "torch":
                        return True
    return False


def _rewrite_decorator(edits: Edits, node: cst.CSTNode, origin: str) -> None:
    name, device = edits.use(origin.rpartition(".")[2]), _CUSTOM[origin]
    args = () if device is None else (_argument(f'"{device}"', "device_type"),)
    edits.replace(node, cst.Call(name, args) if args else name)
    edits.mark(node)


def _list_neighbours(edits: Edits) -> None:
    """List what belongs to torch.amp and has no counterpart that is sure to mean the same."""
    view = edits.view
    for node in view.nodes:
        if isinstance(node, (cst.Name, cst.Attribute)) and view.origin(node) == _SHARDED:
            edits.left(
                node,
                "ShardedGradScaler stays: under FSDP2, castwise.GradScaler(process_group=...) or castwise.Amp agree between ranks",
            )
        elif (
            isinstance(node, cst.ImportFrom)
            and isinstance(node.names, cst.ImportStar)
            and node.module is not None
        ):
            module = view.code(node.module)
            if module in ("torch.cuda.amp", "torch.amp", "torch.cpu.amp"):
                edits.left(node, f"from {module} import * hides which names are used; import them by name")
