"""Models that leave castwise: as a program of torch.export with casts in its graph, or as a plain module with cast weights."""

from castwise.core.serve.baking import bake
from castwise.core.serve.exporting import export

__all__ = ["bake", "export"]
