"""``colossalai.amp``: prepares a model, an optimizer and a criterion to train in one of Colossal-AI's three AMP modes."""

from __future__ import annotations

from castwise.bridges.compat.colossalai.amp.amp_type import AMP_TYPE
from castwise.bridges.compat.colossalai.amp.conversion import (
    AmpCriterion,
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_naive_amp,
    convert_to_torch_amp,
    prepare,
)
from castwise.bridges.compat.colossalai.amp.optimizers import (
    AmpOptimizer,
    ApexAMPOptimizer,
    NaiveAMPOptimizer,
)
from castwise.bridges.compat.coverage import missing_attribute

__all__ = [
    "AMP_TYPE",
    "AmpCriterion",
    "AmpOptimizer",
    "ApexAMPOptimizer",
    "NaiveAMPOptimizer",
    "convert_to_amp",
    "convert_to_apex_amp",
    "convert_to_naive_amp",
    "convert_to_torch_amp",
    "prepare",
]
__getattr__ = missing_attribute("colossalai.amp")
