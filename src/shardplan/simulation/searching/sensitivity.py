"""Topologies of which a part is slower, or faster, and a search repeated on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from shardplan.hardware.topology import Topology

Best = TypeVar("Best")


def sensitivity(topology: Topology, again: Callable[[Topology], Best], share: float) -> dict[str, tuple[Best, Best]]:
    """Return by part of a topology what is found with it slower, and faster, by a share."""
    return {
        name: (again(change(1 - share)), again(change(1 + share))) for name, change in scalable_parts(topology).items()
    }


def scalable_parts(topology: Topology) -> dict[str, Callable[[float], Topology]]:
    """Return by part of a topology what makes it so many times as fast: levels by name, `flops`, `memory_bandwidth`.

    `memory` becomes so many times as large, where it is known.
    """
    device = topology.device

    def level(k: int) -> Callable[[float], Topology]:
        def change(times: float) -> Topology:
            levels = list(topology.levels)
            levels[k] = replace(levels[k], bandwidth=levels[k].bandwidth * times)
            return replace(topology, levels=tuple(levels))

        return change

    found = {one.name: level(k) for k, one in enumerate(topology.levels)}
    found["flops"] = lambda times: replace(
        topology, device=replace(device, flops=tuple((d, f * times) for d, f in device.flops))
    )
    found["memory_bandwidth"] = lambda times: replace(
        topology, device=replace(device, memory_bandwidth=device.memory_bandwidth * times)
    )
    if np.isfinite(device.memory):
        found["memory"] = lambda times: replace(topology, device=replace(device, memory=device.memory * times))
    return found
