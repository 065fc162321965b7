"""Who sends what where a `BoxTable` says what devices hold: boxes, each from one holder to one device that lacks it.

A device keeps what it holds. What else it needs it has of a holder in the smallest block of ids around it that has one
(`core.holders`), of that which has sent least so far, of several the one of the smallest id; the devices that receive
are served in order of their ids. So it depends on device ids and boxes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardplan.core.box_table import split


class Rows(NamedTuple):
    """What the devices of a type hold: boxes of the array, and where each lies in its device's flat storage."""

    places: np.ndarray  # in the type's mesh, int64 [rows]
    ids: np.ndarray  # of devices, int64 [rows]
    boxes: np.ndarray  # int64 [rows, ndim, 2]
    offsets: np.ndarray  # int64 [rows]
    strides: np.ndarray  # int64 [rows, ndim]
    group: np.ndarray  # a row may be sent to a row of the same group, int64 [rows]


@dataclass(frozen=True, slots=True, eq=False)
class Parcels:
    """Boxes [n, ndim, 2] of the array, and the rows of either side that hold them, int64 [n]."""

    source: Rows
    target: Rows
    given: np.ndarray  # numbers of source rows
    taken: np.ndarray  # numbers of target rows
    boxes: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Elements, int64 [n]."""
        return np.prod(self.boxes[..., 1] - self.boxes[..., 0], axis=1, dtype=np.int64)

    @property
    def stay_mask(self) -> np.ndarray:
        """Which stay on their device, bool [n]."""
        return self.source.ids[self.given] == self.target.ids[self.taken]

    @property
    def complete(self) -> bool:
        """Whether every target row is made up."""
        boxes = self.target.boxes
        return int(self.sizes.sum()) == int(np.prod(boxes[..., 1] - boxes[..., 0], axis=1, dtype=np.int64).sum())

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The places of the senders and of the receivers, int64 [n]."""
        return self.source.places[self.given], self.target.places[self.taken]


def parcels_of(source: Rows, target: Rows, near: tuple[int, ...] = ()) -> Parcels:
    """Return the boxes that make up the target rows; `near` lists the sizes of nested blocks of ids."""
    sent = dict.fromkeys(source.ids.tolist(), 0)
    low, high = source.boxes[..., 0], source.boxes[..., 1]
    found: list[tuple[int, int, np.ndarray]] = []
    for row, (box, here, group) in enumerate(zip(target.boxes, target.ids.tolist(), target.group, strict=True)):
        meets = (np.maximum(low, box[:, 0]) < np.minimum(high, box[:, 1])).all(axis=1) & (source.group == group)
        there = zip(np.flatnonzero(meets).tolist(), source.ids[meets].tolist(), strict=True)
        rest = box[None]
        # How many blocks part a holder from the receiver comes before what it has sent.
        ways = ((d != here, sum(d // n != here // n for n in near), sent[d], d, k) for k, d in there)
        for away, _, _, device, k in sorted(ways):
            if not len(rest):
                break
            inside, rest = split(rest, source.boxes[k])
            found.extend((k, row, part) for part in inside)
            if away:
                sent[device] += int(np.prod(inside[..., 1] - inside[..., 0], axis=1).sum())
    given, taken, boxes = zip(*found, strict=True)
    return Parcels(source, target, np.array(given), np.array(taken), np.stack(boxes))
