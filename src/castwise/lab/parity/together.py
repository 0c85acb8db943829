"""A model looked at by one process, or by all that hold it together: DistributedDataParallel's or FSDP2's ranks make one report."""

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
    """The processes that look at a model together.

    Args:
        group: That they are; :data:`~castwise.ranks.ALONE` for this one by itself.
        failed: What is said of a user's own function that fails.

    Attributes:
        model: Whole, without a wrapper; not to be changed.
        compiled: Whether a part of it, or its wrapper, was compiled.
    """

    model: nn.Module
    compiled: bool

    def __init__(self, group: Any, failed: str) -> None:
        super().__init__(group)
        self._failed = failed

    def every(self, task: Callable[[], _T]) -> list[_T]:
        """As of :class:`~castwise.ranks.Ranks`, and what a user's own function raises is said in a sentence."""

        def said() -> _T:
            with users_code(self._failed):
                return task()

        return super().every(said)

    def alike(self, call: str, names: Sequence[str], given: Callable[[], _Given]) -> _Given:
        """Check on all what they were given, and that it is the same: one report cannot be of several plans.

        Args:
            call: The caller, for errors.
            names: Of its arguments.
            given: Checks them, and returns them in that order, and others behind them that may differ.

        Raises:
            PlanError: Ranks were given different ones; on all alike.
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
                    f"{call}: ranks were given different {name} ({said}). Give every rank the same, or "
                    "call it on each rank by itself with the module inside the wrapper"
                )
        return every[self.rank]


@contextlib.contextmanager
def together(
    model: nn.Module, call: str, *, what: str = "the model or its loss", group: Any = None
) -> Iterator[Looking]:
    """Look at a model, on all ranks of its wrapper together; random numbers, settings and the model are as before at the end.

    Args:
        model: In DistributedDataParallel, sharded by FSDP2 or tensor parallelism, or of this process alone.
        call: The caller, for errors.
        what: Of the user's own may fail.
        group: In the place of the wrapper's ranks.

    Raises:
        WorkloadError: No model, there is no room for a whole copy, or the wrapper itself is called meanwhile.
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
        if cut or inner is not model:  # whose ranks would wait for one another, with the rest undone

            def refuse(*_: Any) -> None:
                raise not_given(model, call, "the loss calls")

            stack.callback(model.register_forward_pre_hook(refuse, prepend=True).remove)
        yield ranks


def _exact(value: object) -> str:
    """The same for values that are the same."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_exact, value))
    return value.digest if isinstance(value, Plan) else repr(value)


def _shown(value: object) -> str:
    return ", ".join(map(_shown, value)) if isinstance(value, (list, tuple)) else str(value)
