"""A clock that stands still while its process is suspended."""

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds during which this process ran; read it often.

    A process that is stopped and continued, by `scontrol suspend` say, has not heard the others meanwhile. That is no
    silence of theirs. So the time between two readings does not count where it is longer than `longest_gap_s`.

    Example:
      >>> clock = AwakeClock(longest_gap_s=3.0)
      >>> clock.now() <= clock.now()
      True
    """

    def __init__(self, longest_gap_s: float, read: Callable[[], float] = time.monotonic):
        """Starts the clock.

        Args:
          longest_gap_s: seconds between two readings in a process that runs.
          read: returns seconds, suspended ones too.
        """
        self._longest_gap_s, self._read = longest_gap_s, read
        self._last_s, self._suspended_s = read(), 0.0

    def now(self) -> float:
        """Returns the seconds so far, from any origin."""
        read_s = self._read()
        gap_s, self._last_s = read_s - self._last_s, read_s
        if gap_s > self._longest_gap_s:
            self._suspended_s += gap_s
        return read_s - self._suspended_s
