"""A process as others recognise it: its id, and when it started, since ids come again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Peer(NamedTuple):
    """A process: `started` is in clock ticks since boot, 0 where the system does not say."""

    pid: int
    started: int

    @classmethod
    def me(cls) -> Peer:
        """Return this process."""
        return cls(os.getpid(), _process_start(os.getpid()) or 0)

    def alive(self) -> bool:
        """Return whether it runs: neither gone, nor dead and not yet collected, nor another one of the same id."""
        if not Path("/proc/self/stat").exists():
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                return True
            return True
        return _process_start(self.pid) == self.started


def _process_start(pid: int) -> int | None:
    """When a process started, None where it does not run; the fields of proc_pid_stat(5) behind the last bracket."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
