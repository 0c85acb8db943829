"""Examine a model in one process, or in all ranks of DistributedDataParallel or FSDP2 together, with one report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import nn

from castwise.core import _torch
from castwise.core.parallel.whole import is_cut, ranks_of
from castwise.core.parallel.wrappers import inside_ddp, unwrap
from castwise.core.plans.plan import Plan
from castwise.core.ranks import Ranks
from castwise.core.ranks.text import named
from castwise.errors import PlanError, WorkloadError
from castwise.lab.passes.isolation import copied, not_given, undisturbed, unspoilt
from castwise.lab.workloads.workload import users_code

_T = TypeVar("_T")
_Given = TypeVar("_Given", bound=tuple[Any, ...])


class Looking(Ranks):
    """The processes that examine a model together.

    Args:
        group: The process group of these processes; :data:`~castwise.ranks.ALONE` for this process alone.
        failed: Message prefix if a user's function fails.

    Attributes:
        model: The whole model without a wrapper; not to be changed.
        compiled: Whether a part of the model, or its wrapper, was compiled.
    """

    model: nn.Module
    compiled: bool

    def __init__(self, group: Any, failed: str) -> None:
        super().__init__(group)
        self._failed = failed

    def every(self, task: Callable[[], _T]) -> list[_T]:
        """Run a task on every rank and return all results, as :meth:`castwise.ranks.Ranks.every` does.

        An error from a user's function is raised as an error of castwise with one sentence.
        """

        def said() -> _T:
            with users_code(self._failed):
                return task()

        return super().every(said)

    def alike(self, call: str, names: Sequence[str], given: Callable[[], _Given]) -> _Given:
        """Check on all ranks that their arguments are valid and equal, since one report cannot cover several plans.

        Args:
            call: The caller, for errors.
            names: Names of the arguments.
            given: Checks the arguments and returns them in the order of ``names``, followed by values that may differ.

        Raises:
            PlanError: Ranks got different arguments; raised on all ranks.
        """
        every = self.every(given)
        for at, name in enumerate(names):
            told: dict[Any, list[int]] = {}
            for rank, one in enumerate(every):
                told.setdefault(_exact(one[at]), []).append(rank)
            if len(told) > 1:
                said = "; ".join(
                    f"{named(ranks)}: {_shown(every[ranks[0]][at])}" for ranks in [*told.values()][:5]
                )
                raise PlanError(
                    f"{call}: ranks were given different {name} ({said}). Give every rank the same {name}, "
                    f"or call {call} on each rank separately with the module inside the wrapper"
                )
        return every[self.rank]


@contextlib.contextmanager
def together(
    model: nn.Module, call: str, *, what: str = "the model or its loss", group: Any = None
) -> Iterator[Looking]:
    """Yield the ranks that examine a model together; restore random numbers, settings and the model after the block.

    The ranks are those of the model's wrapper, such as DistributedDataParallel.

    Args:
        model: The model, in DistributedDataParallel, sharded by FSDP2 or tensor parallelism, or of this process
            alone.
        call: The caller, for errors.
        what: The user's functions that may fail, for errors.
        group: Used instead of the wrapper's ranks.

    Raises:
        WorkloadError: The argument is not a model, memory does not suffice for a whole copy, or the wrapper itself is
            called inside the block.
    """
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"{call}: model is {type(model).__name__}; give the torch.nn.Module itself")
    with undisturbed(), contextlib.ExitStack() as stack:
        known = ranks_of(model) if group is None else Ranks(group)
        ranks = Looking(known.group, f"{call}: {what} failed")
        ranks.compiled = any(map(_torch.dynamo.is_compiled, model.modules()))
        cut = is_cut(model)
        inner = unwrap(model) if cut else inside_ddp(model)
        ranks.model = copied(inner, call) if cut else inner
        ranks.each(lambda: stack.enter_context(unspoilt(inner, call)))
        if cut or inner is not model:  # a call of the wrapper would let its ranks wait for each other forever

            def refuse(*_: Any) -> None:
                raise not_given(model, call, "the loss calls")

            stack.callback(model.register_forward_pre_hook(refuse, prepend=True).remove)
        yield ranks


def _exact(value: object) -> str:
    """Return a string that is equal for equal values."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_exact, value))
    return value.digest if isinstance(value, Plan) else repr(value)


def _shown(value: object) -> str:
    return ", ".join(map(_shown, value)) if isinstance(value, (list, tuple)) else str(value)
