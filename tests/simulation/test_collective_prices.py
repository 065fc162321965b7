"""Collectives of the closed form cost what `hardware.prices` says of the same groups, written out device by device."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan import Topology
from shardplan.core.pattern import Groups, Messages
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.simulation.closed.collectives import KINDS, CollectivePrices, normal_axes, with_network
from shardplan.simulation.closed.parameters import Parameters

SIZES = {"dgx-a100-80g": 4, "dgx-h100": 6, "gb300-nvl72": 2, "gcp-a100x16": 3, "mi300x": 4}
TOPOLOGIES = [Topology.load(name, nodes=n) for name, n in SIZES.items()]


def groups(devices: int, axes: list[tuple[int, int]]) -> np.ndarray:
    """All groups of so many devices along axes, by plain loops: devices whose other coordinates are the same."""
    found: dict[tuple[int, ...], list[int]] = {}
    for device in range(devices):
        rest = device
        for size, stride in axes:
            rest -= (device // stride) % size * stride
        found.setdefault((rest,), []).append(device)
    return np.array([ids for ids in found.values() if len(ids) == max(map(len, found.values()))])


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    topology = draw(st.sampled_from(TOPOLOGIES))
    degrees = [d for d in (1, 2, 3, 4, 6, 8, 12, 16) if topology.size % d == 0]
    inner = draw(st.sampled_from(degrees))
    size = draw(st.sampled_from([d for d in degrees if topology.size % (inner * d) == 0]))
    axes = [(size, inner)]
    rest = topology.size // (inner * size)
    if draw(st.booleans()):
        gap = draw(st.sampled_from([d for d in degrees if rest % d == 0]))
        more = draw(st.sampled_from([d for d in degrees if rest % (gap * d) == 0]))
        axes.append((more, inner * size * gap))
    return {
        "topology": topology,
        "kind": draw(st.sampled_from(sorted(KINDS.items()))),
        "axes": axes,
        "nbytes": draw(st.sampled_from((8.0, 4096.0, 3e5, 1e7, 2e9))),
        "network": draw(st.sampled_from((0.4, 1.0))),
        "captured": draw(st.booleans()),
    }


@given(cases())
@settings(max_examples=120, deadline=None)
def test_a_collective_costs_what_hardware_says(case: dict[str, Any]) -> None:
    (summed, whole), kind = case["kind"]
    topology, p = case["topology"], Parameters(network=case["network"])
    axes = [(np.array([n]), np.array([s])) for n, s in case["axes"]]
    found = CollectivePrices.of(topology, p, case["captured"]).lines(summed, whole, axes)
    members = groups(topology.size, case["axes"])
    held = case["nbytes"] / (1 if summed else members.shape[1])
    fabric = Fabric(with_network(topology, p), launch=0.0 if case["captured"] else None)
    want = price(Groups(kind, members, np.full(len(members), held)), fabric).seconds
    assert found.seconds(np.array([case["nbytes"]])).item() == pytest.approx(want, rel=1e-9, abs=1e-15)


@given(
    st.sampled_from(TOPOLOGIES),
    st.sampled_from((1, 2, 3, 8)),
    st.sampled_from((2, 3, 4)),
    st.sampled_from((8.0, 1e4, 1e7)),
)
@settings(max_examples=30, deadline=None)
def test_a_message_costs_what_hardware_says(topology: Topology, distance: int, stages: int, nbytes: float) -> None:
    whole = topology.size // (distance * stages) * distance * stages
    found = CollectivePrices.of(topology, Parameters(network=1.0)).message_lines(
        np.array([distance]), np.array([stages])
    )
    pairs = np.array([(d, d + distance) for d in range(whole) if d // distance % stages < stages - 1])
    want = price(Messages(pairs[:, 0], pairs[:, 1], np.full(len(pairs), nbytes)), Fabric(topology)).seconds
    assert found.seconds(np.array([nbytes])).item() == pytest.approx(want, rel=1e-9)


def test_many_groups_are_each_alone() -> None:
    prices = CollectivePrices.of(TOPOLOGIES[1], Parameters())
    sizes, strides = np.array([1, 2, 8, 48, 6]), np.array([1, 1, 1, 1, 8])
    nbytes = np.array([[1e3, 1e4, 1e5, 1e6, 1e7], [0.0, 1e8, 1e2, 1e3, 0.0]])
    for summed, whole in itertools.product((True, False), (True, False)):
        together = prices.lines(summed, whole, [(sizes, strides)]).seconds(nbytes)
        for row, column in itertools.product(range(2), range(5)):
            one = [(sizes[column : column + 1], strides[column : column + 1])]
            alone = prices.lines(summed, whole, one).seconds(nbytes[row, column : column + 1]).item()
            assert together[row, column] == alone
        assert together[1, 0] == together[1, 4] == together[0, 0] == 0


def test_axes_are_told_in_one_way() -> None:
    assert normal_axes(((4, 1), (2, 4))) == ((8, 1),)
    assert normal_axes(((2, 16), (1, 4), (4, 2))) == ((2, 16), (4, 2))
    assert normal_axes(((1, 1),)) == ()


def test_of_alternatives_the_least_line_is_paid() -> None:
    prices, nbytes = CollectivePrices.of(TOPOLOGIES[1], Parameters()), np.array([1e3, 1e8])
    strides = np.array([[1, 1], [6, 8], [24, 2]])
    for summed, whole in itertools.product((True, False), (True, False)):
        together = prices.lines(summed, whole, [(np.array([2, 6]), strides)]).seconds(nbytes)
        each = [prices.lines(summed, whole, [(np.array([2, 6]), one)]).seconds(nbytes) for one in strides]
        assert together.tolist() == np.min(each, axis=0).tolist()
