"""``colossalai.utils.timer``: the times of parts of a training."""

from __future__ import annotations

import time
from collections.abc import Iterator

from castwise.bridges.compat.colossalai.utils.cuda import synchronize
from castwise.errors import StateError

__all__ = ["MultiTimer", "Timer"]


class Timer:
    """Seconds from :meth:`start` to :meth:`stop`, including the device's work."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._elapsed_s = 0.0
        self._history: list[float] = []

    @property
    def has_history(self) -> bool:
        """Whether an interval was kept."""
        return bool(self._history)

    def start(self) -> None:
        """Begin; waits for the device."""
        synchronize()
        self._begun_s = time.perf_counter()

    def stop(self, keep_in_history: bool = False) -> float:
        """Stop, and keep the interval if requested; waits for the device. Returns its length in seconds."""
        if self._begun_s is None:
            raise StateError("Timer.stop: the timer was not started; call start() first")
        synchronize()
        self._elapsed_s = time.perf_counter() - self._begun_s
        self._begun_s = None
        if keep_in_history:
            self._history.append(self._elapsed_s)
        return self._elapsed_s

    def get_elapsed_time(self) -> float:
        """The last interval in seconds."""
        return self._elapsed_s

    def get_history_sum(self) -> float:
        """The sum of the intervals kept, in seconds."""
        return sum(self._history)

    def get_history_mean(self) -> float:
        """The mean of the intervals kept, in seconds; 0 without intervals."""
        return sum(self._history) / len(self._history) if self._history else 0.0

    def forget_first(self, count: int) -> None:
        """Leave out the first intervals, which are slower than the rest."""
        del self._history[:count]

    def reset(self) -> None:
        """Forget all intervals."""
        self._begun_s, self._elapsed_s = None, 0.0
        self._history.clear()


class MultiTimer:
    """Timers by name, which do nothing while they are off."""

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Start a timer, created at its first use."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """Stop a timer; return its interval in seconds, or None if timers are off."""
        return self._timers[name].stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """A timer by its name."""
        return self._timers.setdefault(name, Timer())

    def reset(self, name: str | None = None) -> None:
        """Reset a timer, or all."""
        for known, timer in self._timers.items():
            if name in (None, known):
                timer.reset()

    def is_on(self) -> bool:
        """Whether timers are on."""
        return self._on

    def set_status(self, mode: bool) -> None:
        """Turn the timers on or off."""
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        yield from self._timers.items()
