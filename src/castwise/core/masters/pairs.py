"""Keep parameters and their fp32 masters equal, by copying a write to one of the two to the other."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.masters.originals import address, agree, local, merge_values
from castwise.core.masters.sample import Sample
from castwise.core.masters.state import restride_state
from castwise.core.masters.writes import DataWrites
from castwise.errors import StateError

Mark = tuple[int, int, int, int]
"""Four numbers by which later writes to a parameter or its fp32 master are detected, recorded when both were equal.

They are the parameter's version counter, the number of writes through its ``data``, the address of its memory, and the
master's version counter."""
_UNKNOWN: Mark = (-1, -1, -1, -1)


def mark_of(master: Any) -> Mark:
    """Return the :data:`Mark` of an fp32 master and its parameter at this moment, when both are equal."""
    stored, own = _torch.tensors.versions([master.stored, master])
    return stored, master.data_writes.count, address(master.stored), own


class Pairs:
    """The fp32 masters of an optimizer and their parameters.

    The methods detect writes to a master or to its parameter, and copy them to the other of the two.

    Args:
        optimizer: The optimizer of the masters. Its state is converted if a parameter changes its strides.
        masters: The masters, in the order of the optimizer's groups.
        marks: The :data:`Mark` of each parameter, by the parameter's ``id``. A parameter without a mark is compared with
            its master before the next step.
    """

    def __init__(
        self,
        optimizer: weakref.ref[Optimizer],
        masters: Iterable[Any] = (),
        marks: Mapping[int, Mark] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self.masters: list[Any] = [*masters]
        self.stored: list[nn.Parameter] = [master.stored for master in self.masters]
        self._targets = [local(parameter) for parameter in self.stored]
        self._sources = [local(master) for master in self.masters]
        self._data = [master.data_writes for master in self.masters]
        self._aliases = -1
        """The number of aliases in the process when all counts of writes through ``data`` were zero."""
        self._plain = all(issubclass(type(parameter), nn.Parameter) for parameter in self.stored)
        """Whether no parameter is of a class that wraps other tensors, such as DTensor."""
        self._sample: Sample | None = None
        now = [(marks or {}).get(id(parameter), _UNKNOWN) for parameter in self.stored]
        self._written, self._data_written, self._addresses, self._updated = (
            [mark[i] for mark in now] for i in range(4)
        )

    def marks(self) -> dict[int, Mark]:
        """Return the :data:`Mark` of each parameter and its fp32 master, by the ``id`` of the parameter."""
        return dict(zip(map(id, self.stored), self._marks(), strict=True))

    def _marks(self) -> Iterable[Mark]:
        return zip(self._written, self._data_written, self._addresses, self._updated, strict=True)

    def _versions(self, of: list[Any]) -> list[int]:
        """Return the version counters of :attr:`masters` or :attr:`stored`.

        They are read from detached aliases, which share the counters, because that is three times as fast.
        """
        if self._plain:
            of = self._sources if of is self.masters else self._targets
        return _torch.tensors.versions(of)

    def _data_writes(self) -> list[int]:
        """Return the number of writes through each parameter's ``data``, which few programs use."""
        if self._aliases == DataWrites.aliases:
            return [0] * len(self._data)
        aliases = DataWrites.aliases
        if not any(writes.is_used for writes in self._data):
            self._aliases = aliases
        return [writes.count for writes in self._data]

    # --- before a step or a check ---------------------------------------------------------------------------

    def pull(self) -> None:
        """Copy writes by hand to parameters into the fp32 masters, and writes to masters into the parameters.

        This is called before a step. Writes are found by version counters, by the counts of writes through
        ``parameter.data``, and by the addresses of parameters, not by comparing values.
        """
        now = (
            self._versions(self.stored),
            self._data_writes(),
            [*map(torch.Tensor.data_ptr if self._plain else address, self.stored)],
            self._versions(self.masters),
        )
        if now != (self._written, self._data_written, self._addresses, self._updated):
            before = list(self._marks())
            for index, mark in enumerate(zip(*now, strict=True)):
                if mark != before[index]:
                    self._settle(index)

    def look(self) -> None:
        """Search for writes to parameters that torch does not count, such as NumPy's, and copy them to the fp32 masters.

        This is called before a step, after :meth:`pull` has copied all other writes. Only a few elements of each
        parameter are compared.
        """
        if self._sample is None:
            self._sample = Sample(self._targets, self._sources)
        if self._sample.differs():
            if any(target.device.type != "cpu" for target in self._targets):
                warnings.warn(
                    "Parameters of a prepared model were changed in a way that torch does not count as a write (for example "
                    "by DLPack or by a kernel that is not a torch operator), and optimizer.step() has since overwritten them "
                    "from their fp32 masters. Call castwise.masters.refresh_master(parameter) after each such change, or "
                    "write with a torch operator.",
                    stacklevel=4,
                )
            self.refresh()

    def push_written(self) -> None:
        """Update the model from fp32 masters that were written outside of a step."""
        versions = self._versions(self.masters)
        if versions != self._updated:
            for index, (now, before) in enumerate(zip(versions, self._updated, strict=True)):
                if now != before:
                    self._settle(index)

    def refresh(self) -> None:
        """Update the fp32 masters from parameters that were changed by hand.

        Even writes that raised no version counter are found.
        """
        for index, (parameter, master) in enumerate(zip(self.stored, self.masters, strict=True)):
            if not _is_cast(master):
                self._settle(index, look=True)
            elif self._ahead(index) or parameter.shape != master.shape:
                continue
            else:
                merge_values(master, local(parameter).to(master.device), master.former_dtype, cast=True)
                self._updated[index] = _torch.tensors.versions([master])[0]

    def _ahead(self, index: int) -> bool:
        """Whether an fp32 master was written since it was last equal to its parameter."""
        return self._updated[index] not in (-1, *_torch.tensors.versions([self.masters[index]]))

    def _settle(self, index: int, *, look: bool = False) -> None:
        """Make one parameter and its fp32 master equal.

        Args:
            index: Position of the parameter and the master.
            look: Whether to compare values even if no version counter was raised.
        """
        parameter, master = self.stored[index], self.masters[index]
        if _is_cast(master):
            raise StateError(
                f"optimizer.step(): a parameter of shape {tuple(parameter.shape)} was stored in {master.former_dtype} when the "
                f"model was prepared and is {parameter.dtype} now, as after model.float() or model.half(); its master can "
                "no longer update it. Call amp.close(), which writes the masters' values to the parameters, change the dtype, and "
                "prepare the model again."
            )
        written, data, where, _ = mark_of(master)
        ahead = self._ahead(index)
        cast = (written, data) == (self._written[index], self._data_written[index])
        changed = not cast or where != self._addresses[index]
        layout = (parameter.shape, parameter.stride(), parameter.device)
        if (master.shape, master.stride(), master.device) != layout:
            moved = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
            master.data = moved.copy_(
                master.detach() if master.shape == parameter.shape else parameter.detach()
            )
            optimizer = self._optimizer()
            if optimizer is not None:
                restride_state(optimizer)
        target, source = local(parameter), local(master)
        for held, now in (self._targets, target), (self._sources, source):
            if held[index].data_ptr() != now.data_ptr() or held[index].stride() != now.stride():
                self._sample = None
            held[index] = now
        if not ahead:
            if (changed or look) and merge_values(source, target, cast=cast) and cast:
                if look:  # the model is not written now, but at the next step
                    self._updated[index] = mark_of(master)[3]
                    return
                _torch.tensors.copy_each(
                    [target], [source]
                )  # values that model.half().bfloat16() has rounded are restored
        elif not changed:
            _torch.tensors.copy_each([target], [source])
        elif not agree(source, target):
            warnings.warn(
                f"A parameter of shape {tuple(parameter.shape)} and its fp32 master were both written, to different values, "
                "with no forward, state_dict or step of the model in between that would have synchronised them. The master's "
                "values are used. Write to one of them, or call model.state_dict() between the two.",
                stacklevel=5,
            )
            _torch.tensors.copy_each([target], [source])
        self._written[index], self._data_written[index], self._addresses[index], self._updated[index] = (
            mark_of(master)
        )

    # --- after a step ---------------------------------------------------------------------------------------

    def push_updated(self) -> None:
        """Write the fp32 masters that a step has updated into the model's parameters.

        These are the masters with a gradient and those whose version counter was raised. Updates by fused kernels raise no
        version counter.
        """
        due = [index for index, parameter in enumerate(self.stored) if parameter.grad is not None]
        if len(due) < len(self.stored):
            now = zip(self.stored, _torch.tensors.versions(self.masters), self._updated, strict=True)
            due = [
                index
                for index, (parameter, new, old) in enumerate(now)
                if parameter.grad is not None or new != old
            ]
        self._push(due)

    def push_all(self) -> None:
        """Write every fp32 master into its parameter, rounded."""
        self._targets = [local(parameter) for parameter in self.stored]
        self._sources = [local(master) for master in self.masters]
        self._sample = None
        self._push(range(len(self.stored)))

    def _push(self, due: list[int] | range) -> None:
        # Both sides are detached, so that nothing here needs torch.no_grad.
        if len(due) == len(self._targets):
            _torch.tensors.copy_each(self._targets, self._sources)
        else:
            _torch.tensors.copy_each([self._targets[i] for i in due], [self._sources[i] for i in due])
        # The version counters of the sources are read again, since the copy raises them too.
        self._written, self._updated = self._versions(self.stored), self._versions(self.masters)


def _is_cast(master: Any) -> bool:
    """Whether a parameter's dtype has changed since the parameter got its fp32 master, as after ``model.float()``."""
    return master.stored.dtype is not master.former_dtype
