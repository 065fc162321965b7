"""What is searched, as `ranges` sees it: strategies in frames, and what prices them and says what none is below."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from shardplan.hardware.topology import Topology
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.parameters import Parameters

Floats = np.ndarray


class FramedSpace(Protocol):
    """Strategies in an order: frames, each with as many inside."""

    @property
    def frames(self) -> np.ndarray:
        """Rows [frames, fields]."""
        ...

    @property
    def inside(self) -> int:
        """How many strategies a frame has."""
        ...

    def live(self, frames: np.ndarray) -> np.ndarray:
        """Return which of the strategies inside some frames have no option that does nothing: bool [n, inside]."""
        ...

    @property
    def idle(self) -> int:
        """How many have one."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def starts(self) -> np.ndarray:
        """Pairs of a frame and an order of its axes before each frame, and of all, [frames + 1]."""
        ...

    @property
    def floor_order(self) -> int:
        """The code of an order that no order of a frame is below; 0 where each has one."""
        ...

    def pairs(self, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return every order of some frames: the place of the frame among them, the order's code, the pair's place."""
        ...

    def columns(self, frames: np.ndarray, orders: np.ndarray | int, inside: np.ndarray | int) -> Configurations:
        """Return strategies by their frames, codes of orders and places inside: arrays [n], or one for all."""
        ...

    def one(self, index: int) -> Configurations:
        """Return the strategy at a place of the order."""
        ...


class PricedPairs(Protocol):
    """Of every configuration: what is made least, in seconds, and bytes, [n] each."""

    @property
    def seconds(self) -> Floats:
        """Seconds."""
        ...

    @property
    def peak_bytes(self) -> Floats:
        """Bytes."""
        ...


class FlooredForm(Protocol):
    """What prices strategies, and says what none of a frame is below."""

    def on(self, topology: Topology, parameters: Parameters) -> FlooredForm:
        """Return it on another topology, or with other parameters."""
        ...

    def __call__(self, c: Configurations) -> PricedPairs:
        """Price them."""
        ...

    def alike(self, c: Configurations) -> list[np.ndarray]:
        """Return numbers, [n] each: strategies that differ in the order of axes, and not in these, are priced alike."""
        ...

    def floors(self, c: Configurations) -> tuple[Floats, Floats]:
        """Return seconds and bytes, [n] each, that no strategy of their frames is below."""
        ...


def frame_floors(form: FlooredForm, space: FramedSpace, frames: np.ndarray) -> tuple[Floats, Floats]:
    """Return seconds and bytes, [frames] each, that no strategy of these frames is below."""
    return form.floors(space.columns(frames, space.floor_order, 0))
