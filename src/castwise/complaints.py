"""Complaints of operators about dtypes, with the module that they came from and what would cure them."""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Final

import torch
from torch import nn

from castwise.casting.frames import Frame
from castwise.plans.formats import LOW, LOW_DTYPES

_DTYPE_WORDS = re.compile(
    r"\b(?:c10::|torch\.)?(BFloat16|Half|Float|Double|bfloat16|float16|float32|float64|float|double)\b"
)
_DTYPE_NAMES = {
    "bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32",
    "double": "fp64", "float64": "fp64",
}  # fmt: skip
_MISMATCH = re.compile(r"dtype|scalar type|type \(|should be the same|data type", re.IGNORECASE)
_OURS: Final = ("castwise", "torch._ops")
"""Between a call of an operator and its complaint there may be kernels of these."""


def explain_mismatch(error: BaseException | None, model: nn.Module, frame: Frame) -> None:
    """Add to an operator's complaint about dtypes which module it came from and what would cure it.

    The hook that calls this cannot raise an error of its own (torch silences it), so the message of the error on
    its way out is extended in place. Nothing is advised that ``frame``, which was in force, has already.
    """
    if not isinstance(error, RuntimeError) or not error.args or not isinstance(error.args[0], str):
        return
    text = error.args[0]
    found = list(dict.fromkeys(_DTYPE_NAMES[word.lower()] for word in _DTYPE_WORDS.findall(text)))
    if not _MISMATCH.search(text) or not found or "castwise:" in text:
        return
    paths = {module: name for name, module in model.named_modules()}
    running = [model]
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in paths:
            running.append(owner)
        trace = trace.tb_next
    module = running[-1]
    path = paths[module]
    stored = sorted({_DTYPE_NAMES[str(p.dtype).removeprefix("torch.")] for p in module.parameters(recurse=False)
                     if str(p.dtype).removeprefix("torch.") in _DTYPE_NAMES})  # fmt: skip
    known = found if len(found) > 1 else list(dict.fromkeys([*found, *stored]))
    held = f", whose parameters are stored in {', '.join(stored)}" if stored else ""
    operator = _operator(error.__traceback__)
    cures = [f"To cure it give the plan Region({path or '**'!r}, compute='fp32')"]
    if operator is not None and (operator not in frame.rows or frame.rows[operator].rule != "widest"):
        cures.append(f"or the operator rule ops=(({operator!r}, 'widest'),)")
    if not frame.enabled:
        cures.append("or use a plan with rules='native', which casts the inputs of operators")
    if any(p.dtype in LOW_DTYPES and not p.requires_grad for p in model.parameters()):
        cures.append("or store frozen parameters in fp32 as well, by prepare(..., widen='all')")
    error.args = (
        f"{text}\ncastwise: dtypes {' and '.join(known)} met in {_place(path, module)}{held}"
        f"{f', in {operator}' if operator else ''}. {', '.join(cures)}.{_kept_table(running, paths, known)}",
        *error.args[1:],
    )


def _place(path: str, module: nn.Module) -> str:
    return f"{path!r} ({type(module).__name__})" if path else f"{type(module).__name__} itself"


def _operator(trace: TracebackType | None) -> str | None:
    """ATen's name of the operator that complained, by the line of Python that called it; None where it cannot be told."""
    calls = []
    while trace is not None:
        if not trace.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
            calls.append(trace)
        trace = trace.tb_next
    if not calls:
        return None
    code = calls[-1].tb_frame.f_code
    where = next(itertools.islice(code.co_positions(), calls[-1].tb_lasti // 2, None))
    line, last, start, end = where
    if line is None or start is None or end is None:
        return None
    text = linecache.getline(code.co_filename, line).encode()[start : end if last == line else None].decode()
    called = re.match(r"[\w.]*?(\w+)\(", text)
    name = called.group(1) if called else "matmul" if "@" in text else code.co_name
    return name if hasattr(torch.ops.aten, name) else None


def _kept_table(running: list[nn.Module], paths: Mapping[nn.Module, str], known: list[str]) -> str:
    """A sentence on the fp32 buffer nearest to where an operator complained, if there is one.

    Of the modules in ``running`` the innermost is last; ``known`` names the formats that met.
    """
    low = [name for name in known if name in LOW]
    for module in reversed(running):
        for owner in (module, *module.children()):
            for name, buffer in owner.named_buffers(recurse=False):
                known_to_mix = isinstance(owner, nn.modules.batchnorm._BatchNorm)
                if low and buffer.dtype is torch.float32 and buffer.dim() and not known_to_mix:
                    path = paths.get(owner, "")
                    pattern = path or f"type:{type(owner).__name__}"
                    return (
                        f" If {path + '.' if path else ''}{name} is the fp32 tensor, a buffer that is kept as it is, "
                        f"Region({pattern!r}, params={low[0]!r}) stores it in {low[0]}."
                    )
    return ""
