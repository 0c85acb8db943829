"""``colossalai.utils.timer``: timers that measure parts of a training."""

from __future__ import annotations

import time
from collections.abc import Iterator

from castwise.bridges.compat.colossalai.utils.cuda import synchronize
from castwise.errors import StateError

__all__ = ["MultiTimer", "Timer"]


class Timer:
    """Measures the seconds from :meth:`start` to :meth:`stop`, including the device's work."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._elapsed_s = 0.0
        self._history: list[float] = []

    @property
    def has_history(self) -> bool:
        """Whether :meth:`stop` has kept an interval since the last :meth:`reset`."""
        return bool(self._history)

    def start(self) -> None:
        """Wait for the device, then start an interval."""
        synchronize()
        self._begun_s = time.perf_counter()

    def stop(self, keep_in_history: bool = False) -> float:
        """Wait for the device, end the interval and return its length in seconds.

        With ``keep_in_history``, the interval is kept for the sum and the mean.
        """
        if self._begun_s is None:
            raise StateError("Timer.stop: the timer was not started; call start() first")
        synchronize()
        self._elapsed_s = time.perf_counter() - self._begun_s
        self._begun_s = None
        if keep_in_history:
            self._history.append(self._elapsed_s)
        return self._elapsed_s

    def get_elapsed_time(self) -> float:
        """Return the length of the last interval in seconds."""
        return self._elapsed_s

    def get_history_sum(self) -> float:
        """Return the sum of the intervals that were kept, in seconds."""
        return sum(self._history)

    def get_history_mean(self) -> float:
        """Return the mean of the intervals that were kept, in seconds, or 0 if there are none."""
        return sum(self._history) / len(self._history) if self._history else 0.0

    def forget_first(self, count: int) -> None:
        """Forget the first ``count`` intervals that were kept, which are often slower than the rest."""
        del self._history[:count]

    def reset(self) -> None:
        """Forget all intervals."""
        self._begun_s, self._elapsed_s = None, 0.0
        self._history.clear()


class MultiTimer:
    """Holds timers by name. While the timers are off, starting and stopping them does nothing."""

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Start the timer of a name, which is created at its first use."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """Stop a timer and return its interval in seconds, or None if the timers are off."""
        return self._timers[name].stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """Return the timer of a name, which is created at its first use."""
        return self._timers.setdefault(name, Timer())

    def reset(self, name: str | None = None) -> None:
        """Reset the timer of a name, or all timers if no name is given."""
        for known, timer in self._timers.items():
            if name in (None, known):
                timer.reset()

    def is_on(self) -> bool:
        """Whether the timers are on."""
        return self._on

    def set_status(self, mode: bool) -> None:
        """Turn the timers on or off."""
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        yield from self._timers.items()
