"""Complaints of operators about dtypes, with the module that they came from and what would cure them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from castwise.formats import LOW

__all__ = ["explain_mismatch"]

_DTYPE_WORDS = re.compile(
    r"\b(?:c10::|torch\.)?(BFloat16|Half|Float|Double|bfloat16|float16|float32|float64|float|double)\b"
)
_DTYPE_NAMES = {
    "bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32",
    "double": "fp64", "float64": "fp64",
}  # fmt: skip
_MISMATCH = re.compile(r"dtype|scalar type|type \(|should be the same|data type", re.IGNORECASE)


def explain_mismatch(error: BaseException | None, model: nn.Module) -> None:
    """Add to an operator's complaint about dtypes which module it came from and what would cure it.

    The hook that calls this cannot raise an error of its own (torch silences it), so the message of the error on its
    way out is extended in place.
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
    where = f"in {path!r} ({type(module).__name__})" if path else f"in {type(module).__name__} itself"
    held = f", whose parameters are stored in {', '.join(stored)}" if stored else ""
    error.args = (
        f"{text}\ncastwise: dtypes {' and '.join(known)} met {where}{held}. To cure it give the plan "
        f"Region({path or '**'!r}, compute='fp32'), or an operator rule such as ops=((operator, 'widest'),), or use a "
        f"plan with rules='native', which casts the inputs of operators.{_kept_table(running, paths, known)}",
        *error.args[1:],
    )


def _kept_table(running: list[nn.Module], paths: Mapping[nn.Module, str], known: list[str]) -> str:
    """A sentence on the fp32 buffer nearest to where an operator complained, if there is one.

    Args:
        running: The modules whose forward runs, the innermost last.
        paths: Of the modules of the model.
        known: Names of the formats that met.
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
