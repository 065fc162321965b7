"""What a rank waits for, and how the messages of a run that has failed come to an end."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Wait(NamedTuple):
    """A message that a rank waits for: from, or to, `peer`."""

    peer: int
    sent: int  # bytes; 0 for a message to receive
    wire: Releasing


class Releasing(Protocol):
    """How the messages of a run that has failed come to an end."""

    tag: int

    def answer(self, peer: int, sent: int, tag: int) -> None:
        """End the wait of `peer`, under its tag: for a message from this rank, or for `sent` bytes to be taken."""
        ...

    def cut(self, peer: int) -> None:
        """End all waits of this rank, and its connections with them."""
        ...
