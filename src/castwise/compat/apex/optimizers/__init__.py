"""``apex.optimizers``: torch's own by Apex's arguments, and what torch does not have on its foreach operations."""

from __future__ import annotations

from castwise.compat.apex.optimizers.fused_adagrad import FusedAdagrad
from castwise.compat.apex.optimizers.fused_adam import FusedAdam
from castwise.compat.apex.optimizers.fused_lamb import FusedLAMB
from castwise.compat.apex.optimizers.fused_novograd import FusedNovoGrad
from castwise.compat.apex.optimizers.fused_sgd import FusedSGD
from castwise.compat.coverage import missing_attribute

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]

__getattr__ = missing_attribute("apex.optimizers")
