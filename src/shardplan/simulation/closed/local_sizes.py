"""`LocalSizes`: how large what a device has is, at many degrees of axes at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardplan.simulation.closed.work import Extent, LocalValue

Floats = np.ndarray


@dataclass(slots=True, eq=False)
class LocalSizes:
    """The degrees of axes, and sequences on a device, as arrays of one length."""

    degrees: Mapping[str, Floats]
    microbatch: Floats
    batch: int  # of the program
    data: tuple[str, ...]  # axes over which sequences are dealt out
    slots: Floats = field(default_factory=lambda: np.ones((2, 1)))  # see `dispatch.tokens_of_slots`
    known: dict[Extent, Floats] = field(default_factory=dict[Extent, "Floats"])
    _volumes: dict[tuple[Extent, ...], Floats] = field(default_factory=dict["tuple[Extent, ...]", "Floats"])

    def extent(self, e: Extent) -> Floats:
        """Return the size of an extent on a device."""
        found = self.known.get(e)
        if found is None:
            whole: Floats = np.asarray(float(e.size))
            if e.batch:
                whole = e.size / self.batch * self.microbatch
                for axis in self.data:
                    if axis not in e.axes and axis in self.degrees:
                        whole = whole * self.degrees[axis]
                found = whole
                for axis in e.axes:
                    if axis not in self.data:
                        found = np.ceil(found / self.degrees[axis])
            else:
                degree = np.asarray(1.0)
                for axis in e.axes:
                    degree = degree * self.degrees[axis]
                found = np.ceil(whole / degree)
            if e.sharing is not None:
                found = found * self.slots[int(bool(e.sharing))]
            self.known[e] = found
        return found

    def volume(self, extents: Sequence[Extent]) -> Floats:
        """Return the product of some."""
        key = tuple(extents)
        found = self._volumes.get(key)
        if found is None:
            found = np.asarray(1.0)
            for e in extents:
                found = found * self.extent(e)
            self._volumes[key] = found
        return found

    def bytes(self, value: LocalValue) -> Floats:
        """Return the bytes of a value on a device."""
        return value.itemsize * self.volume(value.extents)
