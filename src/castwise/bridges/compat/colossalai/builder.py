"""``colossalai.builder``: cuts a sequence of layers into pipeline stages."""

from __future__ import annotations

from torch import nn

from castwise.bridges.compat.colossalai.context import ParallelMode
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.bridges.compat.coverage import missing_attribute
from castwise.errors import PlanError

__all__ = ["build_pipeline_model"]
__getattr__ = missing_attribute("colossalai.builder")


def build_pipeline_model(layers: nn.Sequential, num_chunks: int = 1, verbose: bool = False) -> nn.Module:
    """Return this rank's pipeline stage, or stages, of a sequence of layers.

    The numbers of layers of two stages differ by one at most.

    Args:
        layers: The whole model, the same on every rank.
        num_chunks: The number of stages per rank, for an interleaved pipeline.
        verbose: Accepted and ignored.

    Returns:
        An ``nn.Sequential`` of the stage's layers, under the names that they have in ``layers``. If ``num_chunks`` is above
        1, an ``nn.ModuleList`` of such stages.

    Raises:
        PlanError: ``layers`` is not an ``nn.Sequential``, or has fewer layers than there are stages.
    """
    ranks, rank = gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE)
    shares = ranks * num_chunks
    if not isinstance(layers, nn.Sequential) or len(layers) < shares:
        raise PlanError(
            f"build_pipeline_model({type(layers).__name__}, num_chunks={num_chunks}): needs an nn.Sequential of at least "
            f"{shares} layers, one for each of {num_chunks} chunks on each of {ranks} ranks"
        )
    named = list(layers.named_children())
    bounds = [len(named) * index // shares for index in range(shares + 1)]
    parts = []
    for index in range(rank, shares, ranks):
        part = nn.Sequential()
        for name, layer in named[bounds[index] : bounds[index + 1]]:
            # the layer keeps its name, so that the checkpoints of all stages together match the whole model
            part.add_module(name, layer)
        parts.append(part)
    return parts[0] if num_chunks == 1 else nn.ModuleList(parts)
