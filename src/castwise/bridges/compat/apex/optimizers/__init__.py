"""``apex.optimizers``. Adam, SGD and Adagrad are torch's, with Apex's arguments; LAMB and NovoGrad use foreach operations."""

from __future__ import annotations

from castwise.bridges.compat.apex.optimizers.fused_adagrad import FusedAdagrad
from castwise.bridges.compat.apex.optimizers.fused_adam import FusedAdam
from castwise.bridges.compat.apex.optimizers.fused_lamb import FusedLAMB
from castwise.bridges.compat.apex.optimizers.fused_novograd import FusedNovoGrad
from castwise.bridges.compat.apex.optimizers.fused_sgd import FusedSGD
from castwise.bridges.compat.coverage import missing_attribute

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]

__getattr__ = missing_attribute("apex.optimizers")
