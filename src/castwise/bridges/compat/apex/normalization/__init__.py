"""``apex.normalization``, which holds the layers. The functions are in ``fused_layer_norm``, as in Apex."""

from __future__ import annotations

from castwise.bridges.compat.apex.normalization.fused_layer_norm import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)
from castwise.bridges.compat.coverage import missing_attribute

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]

__getattr__ = missing_attribute("apex.normalization")
