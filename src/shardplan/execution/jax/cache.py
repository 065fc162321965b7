"""What is compiled is kept, up to a number of bytes: then what was used longest ago goes.

A cache may be used by several threads: one lock guards what it holds, and is not held while a value is made. Two
threads may make one value; the first to finish is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

MOST_BYTES = 512 * 2**20  # of executables, in host memory
RESIDENT = 32  # bytes that an executable of XLA:CPU takes in the process for each of its serialized form, as measured


class BoundedCache:
    """Values by key, bounded by the sum of their bytes; a value above the bound is kept alone.

    >>> cache = BoundedCache(10)
    >>> [cache.get(k, lambda k=k: (k.upper(), 4)) for k in "abac"], sorted(cache.keys())
    (['A', 'B', 'A', 'C'], ['a', 'c'])
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], tuple[Any, int]]) -> Any:
        """Return the value of `key`; where there is none, `make` returns it with its bytes."""
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
                return found[0]
        made = make()  # may take seconds: others go on meanwhile
        with self._lock:
            if key not in self._held:
                self._held[key] = made
                self.bytes += made[1]
            while self.bytes > self.most_bytes and len(self._held) > 1:
                self.bytes -= self._held.popitem(last=False)[1][1]
        return made[0]

    def keys(self) -> tuple[Hashable, ...]:
        """Return the keys, the one used longest ago first."""
        with self._lock:
            return tuple(self._held)


EXECUTABLES = BoundedCache(MOST_BYTES)


def code_bytes(executable: Any) -> int:
    """Return the bytes that an executable of JAX takes: what its platform says, or an estimate where it says 0.

    XLA:CPU says 0. There it is `RESIDENT` times the serialized form: over 30 programs of 14 collectives the resident
    memory of a process grew by 20 times that, over 30 of one by 33 (jaxlib 0.10.2, with what JAX keeps of each).
    """
    analysis = executable.memory_analysis()
    said = 0 if analysis is None else int(analysis.generated_code_size_in_bytes)
    return said or RESIDENT * len(executable.runtime_executable().serialize())
