"""Export a model with the casts of its operators in the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from castwise.core._torch import dynamo

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def export_with_casts(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    """Return what ``torch.export.export(..., strict=False)`` returns, but traced below autocasting, so that casts are in the graph.

    ``torch.export.export`` traces operators before autocasting sees them, and records only blocks of ``torch.autocast`` itself.
    torch's own compilers call ``_export`` with ``pre_dispatch=False``, which traces what autocasting makes of operators.
    """
    from torch.export._trace import _export  # takes a second to import

    with _casts_recorded(), torch.no_grad():
        program: ExportedProgram = _export(
            model, args, dict(kwargs), dynamic_shapes, strict=False, pre_dispatch=False
        )
    return program


@contextlib.contextmanager
def _casts_recorded() -> Any:
    before, dynamo._casts_recorded = dynamo._casts_recorded, True
    try:
        yield
    finally:
        dynamo._casts_recorded = before
