"""Complaints of operators about dtypes, with the module that they came from and what would cure them."""

from __future__ import annotations

import re

from torch import nn

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
    paths = {id(module): name for name, module in model.named_modules()}
    path, module = "", model
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            path, module = paths[id(owner)], owner
        trace = trace.tb_next
    stored = sorted({_DTYPE_NAMES[str(p.dtype).removeprefix("torch.")] for p in module.parameters(recurse=False)
                     if str(p.dtype).removeprefix("torch.") in _DTYPE_NAMES})  # fmt: skip
    known = found if len(found) > 1 else list(dict.fromkeys([*found, *stored]))
    where = f"in {path!r} ({type(module).__name__})" if path else f"in {type(module).__name__} itself"
    held = f", whose parameters are stored in {', '.join(stored)}" if stored else ""
    error.args = (
        f"{text}\ncastwise: dtypes {' and '.join(known)} met {where}{held}. To cure it give the plan "
        f"Region({path or '**'!r}, compute='fp32'), or an operator rule such as ops=((operator, 'widest'),), or use a "
        "plan with rules='native', which casts the inputs of operators.",
        *error.args[1:],
    )
