"""The seconds of collectives and messages as affine functions of bytes: a line for each row of the library.

Who prices a movement at many sizes asks for its lines once; the least of them is what `price` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from shardplan.core.pattern import Groups
from shardplan.hardware.prices.cost import Price, lay_groups, message_row_prices, row_prices
from shardplan.hardware.prices.fabric import Fabric, Flows, Ints
from shardplan.hardware.prices.library import Library
from shardplan.hardware.prices.traffic import messages
from shardplan.hardware.topology import Topology


def affine_costs(kind: str, members: Ints, fabric: Fabric) -> tuple[tuple[float, float], ...]:
    """Return the cost of a collective as affine functions of bytes, one for each row; the least of them is paid.

    Args:
        kind: As in `Groups.kind`.
        members: Topology ids, int64 [G, k], in member order.
        fabric: The resources.

    Returns:
        Pairs of seconds at 0 bytes and seconds per byte that a member holds before the op.
    """
    return affine_costs_by_kind((kind,), members, fabric)[0]


def affine_costs_by_kind(
    kinds: Sequence[str], members: Ints, fabric: Fabric, algorithm: str = "auto"
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Return `affine_costs` of several collectives over the same groups, which are laid on the topology once."""
    laid, byte = lay_groups(members, fabric), np.ones(len(members))
    return tuple(_lines(row_prices(Groups(kind, members, byte), laid, byte, algorithm)) for kind in kinds)


def affine_message_costs(sender: Ints, receiver: Ints, fabric: Fabric) -> tuple[tuple[float, float], ...]:
    """Return the cost of messages that go at once as affine functions of bytes, one for each row; the least is paid.

    Args:
        sender: Topology ids, int64 [n].
        receiver: Topology ids, int64 [n], none of them its sender.
        fabric: The resources.

    Returns:
        Pairs of seconds at 0 bytes and seconds per byte of a message.
    """
    found = messages(Flows(sender, receiver, np.ones(len(sender))), fabric)
    return _lines(message_row_prices(found, 1, fabric, "auto"))


def _lines(found: Sequence[Price]) -> tuple[tuple[float, float], ...]:
    """The lines, latency and seconds a byte, of prices of one byte; without those that are nowhere the least."""
    return least_lines((one.alpha, one.transfer) for one in found)


def least_lines(lines: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return lines, seconds at 0 bytes and seconds a byte, without those that start later and are no faster."""
    sorted_lines = sorted({*lines})
    return tuple(line for n, line in enumerate(sorted_lines) if all(line[1] < other[1] for other in sorted_lines[:n]))


def linear_cost(kind: str, members: Ints, fabric: Fabric, nbytes: float) -> tuple[float, float]:
    """Return the cost of a collective as one affine function of bytes: that of the row which is cheapest at `nbytes`.

    `members` are device ids, int64 [G, k], in member order.

    Returns:
        Seconds at 0 bytes, and seconds per byte that a member holds before the op.
    """
    return min(affine((kind,), members, fabric)[0], key=lambda line: line[0] + line[1] * nbytes)


def affine(kinds: tuple[str, ...], members: Ints, fabric: Fabric) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Return `affine_costs` of several collectives over the same groups of device ids; remembered."""
    ids = np.ascontiguousarray(fabric.topology_ids(members))
    return _affine(kinds, ids.tobytes(), ids.shape, fabric.topology, fabric.library, fabric.launch)


@lru_cache(maxsize=4096)  # a search asks for the same groups again for every tensor and placement
def _affine(
    kinds: tuple[str, ...], ids: bytes, shape: tuple[int, int], topology: Topology, library: Library, launch: float
) -> tuple[tuple[tuple[float, float], ...], ...]:
    members, fabric = (
        np.frombuffer(ids, dtype=np.int64).reshape(shape),
        Fabric(topology, launch=launch).with_library(library),
    )
    return affine_costs_by_kind(kinds, members, fabric)
