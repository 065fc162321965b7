"""The version of the weights that a target holds: kept with its tensors, so that all handles of one model share it."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardplan.errors import BackendError


class ServedVersion:
    """What a target holds: a version, or why there is none."""

    __slots__ = ("changes", "reason", "torn", "version")

    def __init__(self) -> None:
        self.version: int | None = None
        self.reason = "no refit has run"
        self.changes = 0  # how often a refit, of any handle, has begun
        self.torn = False  # whether a refit has failed and no full one has succeeded since

    def begin(self) -> None:
        """Take the version back: parameters are about to change."""
        self.version, self.reason = None, "a refit is under way"
        self.changes += 1

    def fail(self, error: BaseException) -> None:
        """Say why there is none: parameters may be torn, until a full refit has succeeded."""
        lines = str(error).splitlines()
        self.version, self.torn = None, True
        self.reason = f"the last refit failed: {lines[0] if lines else type(error).__name__}"

    def succeed(self, version: int) -> None:
        """Hold a version."""
        self.version, self.torn = version, False

    def served_version(self) -> int:
        """Return the version; raises `BackendError` where there is none."""
        if self.version is None:
            raise BackendError(f"these weights are not served: {self.reason}; legal is to serve after a full refit")
        return self.version


_held = WeakTensorKeyDictionary()


def served_by(tensor: torch.Tensor) -> ServedVersion:
    """Return what the model holds whose first tensor this is."""
    if tensor not in _held:
        _held[tensor] = ServedVersion()
    return _held[tensor]
