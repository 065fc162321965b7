"""How busy the machine is, all of it: what runs beside the ranks takes the processors from them as they do."""

from __future__ import annotations

import os
import time

from shardplan.execution.lab.measurement import MOST_BUSY
from shardplan.execution.lab.needs import Unavailable

# Of the first line of /proc/stat: user, nice, system, irq, softirq, steal; idle and iowait are not, guests are in user.
BUSY = (1, 2, 3, 6, 7, 8)
LOOK = 1.0  # seconds for which a machine is looked at before a sweep


def busy_seconds() -> float:
    """Return the seconds that this machine's processors have worked since it started, in sum."""
    with open("/proc/stat", encoding="ascii") as file:
        columns = file.readline().split()
    return sum(int(columns[k]) for k in BUSY) / os.sysconf("SC_CLK_TCK")


def require_idle() -> None:
    """Raise `Unavailable` where others keep the processors busy, so that no cell of a sweep would count."""
    before, began = busy_seconds(), time.monotonic()
    time.sleep(LOOK)
    share = (busy_seconds() - before) / ((time.monotonic() - began) * (os.cpu_count() or 1))
    if share > MOST_BUSY:
        raise Unavailable(
            f"other processes keep {share:.0%} of the processors busy, and cells above {MOST_BUSY:.0%} do not count; "
            "legal is an idle machine, or busy=True (--busy), which measures all the same"
        )
