"""A store that counts what is asked of it."""

from collections import Counter
from typing import Any


class Counting:
    """A store of torch.distributed, with the calls of every method counted."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name == "clone":  # counted too: what another thread asks is asked of the store
            return lambda: self

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return method(*arguments)

        return call
