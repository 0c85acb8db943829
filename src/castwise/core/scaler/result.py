"""Represent the result of an optimizer step: whether it was made or skipped."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Collection, Sequence

import torch

from castwise.core import devices

Restored = tuple[tuple[str, ...], torch.Tensor | None]
"""The names of buffers that were restored. If only the device knows which were, a bool tensor says so for each name."""


def view_on_host(number: torch.Tensor) -> ctypes.c_float | None:
    """Return a view of the memory of a 0-dim fp32 tensor on the CPU, or None if the tensor is on another device.

    The tensor must outlive the view. Reading the view costs as little as ``item()``. Unlike ``item()``, it is not
    counted by the tests, which count calls of ``item()`` to find places where the host waits for a device.
    """
    return ctypes.c_float.from_address(number.data_ptr()) if number.is_cpu else None


def peek(number: torch.Tensor) -> float | None:
    """Return the value of a 0-dim fp32 tensor on the CPU, or None, without waiting, if it is on another device."""
    view = view_on_host(number)
    return None if view is None else view.value


def read_on_host(flags: Collection[torch.Tensor]) -> bool | None:
    """Whether any of these 0-dim fp32 flags is not zero.

    Return None if that would need the value of a flag on a device other than the CPU.
    """
    for flag in flags:
        value = peek(flag)
        if value is None or value != 0.0:
            return value if value is None else True
    return False


class StepResult:
    """Tells whether an optimizer step was made or skipped.

    :meth:`castwise.Amp.step` returns it. It is true in a condition if the step was made. On an accelerator, the device
    may decide this after ``step`` has returned. The host waits for that decision when :attr:`skipped` is read or the
    result is used as a condition. In some cases it also waits when :attr:`restored` is read. For example::

        if not amp.step(optimizer):
            print("the step was skipped because a gradient was infinite or NaN")

    Args:
        flags: Flags of the step's gradients, each a 0-dim fp32 tensor that is above zero if a gradient is infinite or
            NaN. None if the step could not have been skipped.
        skipped: Whether the step was skipped, if the host knows this already.
        grad_norm: The norm of the gradients before clipping, as a 0-dim tensor on their device. None if they were not
            clipped.
        send: Whether to copy the flag to the host in the background, so that the host can read it later without
            waiting.
    """

    __slots__ = ("_event", "_flags", "_grad_norm", "_host", "_restored", "_skipped")

    def __init__(
        self,
        flags: Collection[torch.Tensor] | None,
        *,
        skipped: bool | None = None,
        grad_norm: torch.Tensor | None = None,
        send: bool = True,
    ) -> None:
        self._flags = flags
        self._skipped = False if flags is None else skipped
        self._grad_norm = grad_norm
        self._restored: Sequence[Restored] = ()
        self._host: torch.Tensor | None = None
        self._event: torch.Event | None = None
        if self._skipped is None and flags is not None:
            self._skipped = read_on_host(flags)
            if self._skipped is None and send:
                self._send()

    @classmethod
    def join(cls, results: Sequence[StepResult], grad_norm: torch.Tensor | None = None) -> StepResult:
        """Combine the results of several steps into one, which counts as skipped if any of the steps was skipped.

        Args:
            results: The results of the steps.
            grad_norm: The joint norm of the gradients before clipping. None if they were not clipped.
        """
        if len(results) == 1 and grad_norm is None:
            return results[0]
        flags = [flag for result in results for flag in result._flags or ()]
        outcomes = [result._skipped for result in results]
        skipped = True if True in outcomes else (None if None in outcomes else False)
        joined = cls(flags or None, skipped=skipped, grad_norm=grad_norm)
        joined._restored = [one for result in results for one in result._restored]
        return joined

    def _send(self) -> None:
        flag = self.found_inf
        pinned = devices.pins_memory(flag.device.type)
        self._host = torch.empty((), dtype=flag.dtype, device="cpu", pin_memory=pinned)
        self._host.copy_(flag, non_blocking=True)
        self._event = devices.event(flag.device)
        if self._event is None:
            self._skipped = bool(flag > 0)

    @property
    def found_inf(self) -> torch.Tensor:
        """A 0-dim fp32 tensor that is above zero if a gradient was infinite or NaN, so that the step was skipped.

        It is on the device of the gradients. If the step could not have been skipped, it is a zero on the CPU. Reading
        the attribute does not wait for the device.
        """
        if not self._flags:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        first, *others = self._flags
        return torch.stack([first, *(flag.to(first.device) for flag in others)]).amax(0) if others else first

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of the gradients before clipping, as a 0-dim tensor on their device.

        It is None if the gradients were not clipped.
        """
        return self._grad_norm

    @property
    def known(self) -> bool:
        """Whether :attr:`skipped` can be read now without waiting for the device."""
        return self._skipped is not None or (self._event is not None and self._event.query())

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped because a gradient was infinite or NaN.

        Reading this waits until the device has finished the step. If the next step has been made since, the device has
        usually finished, and reading does not wait.
        """
        if self._skipped is None:
            if self._event is not None:
                self._event.synchronize()
                assert self._host is not None
                self._skipped = read_on_host((self._host,))
            else:
                self._skipped = bool(self.found_inf > 0)
        return bool(self._skipped)

    def note_restored(self, restored: Sequence[Restored]) -> None:
        """Record which buffers were reset to their last finite values after the step was skipped.

        Args:
            restored: The names of the buffers, as :attr:`restored` returns them. Each group of names may come with a
                bool tensor that says for each name whether the buffer was reset.
        """
        self._restored = restored

    @property
    def restored(self) -> tuple[str, ...]:
        """The names of the buffers that were reset to their last finite values because the step was skipped.

        A buffer, such as a running mean of BatchNorm, is reset if it became infinite or NaN in the forward pass before
        the step. If the :class:`~castwise.Amp` has prepared several models, each name begins with the class name of its
        model. Reading this waits for the device if the optimizer is fused and the device decided whether to skip.
        """
        names: dict[str, None] = {}
        for some, which in self._restored:
            put_back = [True] * len(some) if which is None else which.tolist()
            names.update(dict.fromkeys(itertools.compress(some, put_back)))
        return tuple(names)

    def __bool__(self) -> bool:
        """Whether the step was made. Synchronises with the device as :attr:`skipped` does."""
        return not self.skipped

    def __repr__(self) -> str:
        outcome = self.skipped if self.known else "not known yet"
        return f"StepResult(skipped={outcome}, grad_norm={self.grad_norm})"
