"""What else the machine does while something is measured."""

import os
import time
from pathlib import Path


class OtherLoad:
    """How many cores other processes, and other guests of the host, have used from here on."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._before_s = self._others_s()

    def cores(self) -> float:
        """Programs that were started from here must have ended."""
        elapsed_s = max(1e-9, time.monotonic() - self._start_s)
        return max(0.0, self._others_s() - self._before_s) / elapsed_s

    def _others_s(self) -> float:
        try:
            first = Path("/proc/stat").read_text().split("\n", 1)[0]
        except OSError:
            return 0.0
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first.split()[1:9])
        all_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        return all_s - own.user - own.system - own.children_user - own.children_system
