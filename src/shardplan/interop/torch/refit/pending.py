"""A refit under way on a thread of its own, while the caller goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardplan.errors import TimedOut


class RefitStarted:
    """A refit under way on a thread of its own; `wait` for it before its parameters are used or changed."""

    __slots__ = ("_error", "_thread", "version")

    def __init__(self, run: Callable[[], int]) -> None:
        self.version: int | None = None
        self._error: BaseException | None = None

        def body() -> None:
            try:
                self.version = run()
            except BaseException as error:  # raised where it is waited for
                self._error = error

        self._thread = threading.Thread(target=body, name="shardplan-refit", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, in success or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> int:
        """Return the version, once all ranks have it.

        Raises what the refit raised, at every call, and `TimedOut` after `timeout` seconds (it goes on then).
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimedOut(f"the refit has not ended within {timeout:g} s; it goes on")
        if self._error is not None:
            raise self._error
        assert self.version is not None
        return self.version
