"""Write the parts of explanations of dtype errors: names of dtypes, and suggested code."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from castwise.core.model.complaints.calls import Call
from castwise.core.model.complaints.source import Spot
from castwise.core.plans.formats import FORMATS

_WORDS = re.compile(
    r"\b(?:c10::|torch\.)?(BFloat16|Half|Float|Double|bfloat16|float16|float32|float64|float|double)\b"
)
_WORD_NAMES = {
    "bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32",
    "double": "fp64", "float64": "fp64",
}  # fmt: skip
_DTYPE_ERROR = re.compile(
    r"dtype|scalar type|type \(|should be the same|data type|not implemented for", re.IGNORECASE
)
_WHOLE = re.compile(r"\b(long|int|int32|int64|integer|integral)(tensor)?\b|\bind(ex|ices)\b", re.IGNORECASE)
NAMES: Final = {format.dtype: name for name, format in FORMATS.items() if name != "tf32"}
_FACTORIES = re.compile(r"(new_)?(zeros|ones|empty|full|eye|rand|randn|tensor|arange|linspace)(_like)?")


COMPLEX: Final = {
    torch.float16: torch.complex32,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor is floating or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_dtype_error(text: str) -> bool:
    """Whether an error message looks like that of a dtype error."""
    return bool(_DTYPE_ERROR.search(text) and met_in(text))


def asks_for_whole(text: str) -> bool:
    """Whether an error message says that an operator needs integers."""
    return bool(_WHOLE.search(text))


def met_in(text: str) -> list[str]:
    """Return castwise's names of the dtypes that an error message mentions, such as ``["bf16", "fp32"]``."""
    return list(dict.fromkeys(_WORD_NAMES[word.lower()] for word in _WORDS.findall(text)))


def named(dtype: torch.dtype) -> str:
    """Return castwise's name of a dtype, such as ``bf16``, or torch's name if castwise has none."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def writing(call: Call, casts: Mapping[int, torch.dtype]) -> str:
    """Return advice to cast arguments of a call, such as ``write x.to(torch.float32)``.

    ``casts`` maps the ``id`` of each tensor to cast to its new dtype.
    """
    written, unknown = [], set()
    for tensor in call.tensors:
        if id(tensor) in casts:
            dtype = casts[id(tensor)]
            dtype = COMPLEX.get(dtype, dtype) if tensor.is_complex() else dtype
            if text := call.spot.texts.get(id(tensor)):
                written.append(f"{_receiver(text)}.to({dtype})")
            else:
                unknown.add(str(dtype))
    parts = [f"write {' and '.join(dict.fromkeys(written))}"] if written else []
    if unknown:
        also = "its other arguments" if written else "its arguments"
        parts.append(f"cast {also} to {' or '.join(sorted(unknown))}")
    return " and ".join(parts)


def _receiver(text: str) -> str:
    with contextlib.suppress(SyntaxError):
        if isinstance(ast.parse(text, mode="eval").body, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
            return text
    return f"({text})"


def factory(receiver: Tensor, dtype: torch.dtype, floating: list[Tensor], spot: Spot) -> str:
    """Return advice to create a tensor in another dtype, as the line that creates it with ``dtype=`` added.

    The tensor, ``receiver``, is one that an operator writes to. The text is empty if the source does not show a call
    such as ``torch.zeros`` that created it.
    """
    node: ast.expr = ast.parse(spot.texts.get(id(receiver), "0"), mode="eval").body
    number, column = (spot.line.number if spot.line is not None else 0), 0
    if isinstance(node, ast.Name) and (made := spot.maker(node.id)) is not None:
        number, column, node = made.lineno, made.col_offset, made.value
    if not isinstance(node, ast.Call):
        return ""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if not _FACTORIES.fullmatch(name):
        return ""
    said = next((spot.texts.get(id(t), "") for t in floating if t is not receiver and t.dtype is dtype), "")
    names = {n.id for n in ast.walk(ast.parse(said or "0", mode="eval")) if isinstance(n, ast.Name)}
    makers = [maker for maker in map(spot.maker, names) if maker is not None]
    ready = (
        said and "(" not in said and all((m.lineno, m.col_offset) < (number, column or 10**6) for m in makers)
    )
    keywords = [keyword for keyword in node.keywords if keyword.arg != "dtype"]
    value = ast.parse(f"{said}.dtype" if ready else str(dtype), mode="eval").body
    new = ast.Call(node.func, node.args, [*keywords, ast.keyword("dtype", value)])
    return f"write {ast.unparse(new)} in line {number}"


def sentence(cures: list[str], line: str, late: bool) -> str:
    """Return the sentence that lists the cures of a dtype error.

    Args:
        cures: Changes of the plan.
        line: A change of the user's code, or an empty text.
        late: Whether time ran out before all changes of the plan were tried.
    """
    options = [*cures, *([line] if line else [])]
    tried = "which was tried on this call" if len(options) == 1 else "each of which was tried on this call"
    none = (
        "None of the changes to the plan that were tried within the time limit cures it:"
        if late
        else "No rule of a plan cures it:"
    )
    return f"{'To cure it' if cures else none} {'; or '.join(options)}; {tried}."
