"""What every device sends, receives and copies in the general move, without listing messages: see `core.messages`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from shardplan.core.messages import (
    FIGURES,
    at_root,
    has_box_table,
    lacking,
    overlap_elements,
    own_places,
    sender_counts,
    sent_in_general,
)
from shardplan.core.pattern import MessageTotals
from shardplan.core.tensor import TensorType


def message_totals(
    s: TensorType, t: TensorType, near: tuple[int, ...], axes: tuple[str, ...], copies: int = 1
) -> MessageTotals | None:
    """Return the totals of the messages that move so many operands of one type together; arguments as of `messages`.

    None where nobody knows them but by listing the messages.
    """
    given = None if has_box_table(s, t) else sent_in_general(s, t, near, axes)
    if given is None or given.listed:
        return None
    # Of both types: messages that are not listed stay on one mesh.
    order, heard, lacks = np.argsort(s.mesh.ids), sender_counts(s, t), lacking(s, t)
    order = order[(given.elements + lacks)[order] > 0]
    every = given.counts, heard, given.elements * s.itemsize * copies, lacks * copies
    return MessageTotals(s.mesh.ids[order], *(one[order].astype(np.float64) for one in every))


@lru_cache(maxsize=FIGURES)
def own_copy_bytes(s: TensorType, t: TensorType) -> int:
    """Return the most bytes that a device of `t` copies of what it holds; one whose box stays as it is copies none."""
    if has_box_table(s, t):
        return int(overlap_elements(s, t).max(initial=0)) * t.itemsize
    places = own_places(s, t)
    moves = (s.boxes()[places] != t.boxes()).any(axis=(1, 2)) & at_root(t)
    return int(overlap_elements(s, t)[moves].max(initial=0)) * t.itemsize
