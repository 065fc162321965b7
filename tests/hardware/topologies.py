"""Topologies, groups and an independent router for the tests of `shardplan.hardware`."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from shardplan.core.mesh import Mesh
from shardplan.hardware import Level, Topology
from shardplan.hardware.placement import orders, placements
from shardplan.hardware.prices.library import libraries

GB = 1e9


def switches(*sizes, bandwidth=GB, latency=0.0, uplinks=1):
    """A topology of switches, outermost first."""
    levels = tuple(Level(f"l{i}", n, "switch", bandwidth, latency, uplinks) for i, n in enumerate(sizes))
    return Topology("test", levels)


def factorisations(n, parts):
    """Every way to write a number as so many factors, in every order."""
    if parts == 1:
        yield (n,)
        return
    for d in range(1, n + 1):
        if n % d == 0:
            for rest in factorisations(n // d, parts - 1):
                yield (d, *rest)


@st.composite
def any_topology(draw, most=24):
    """Up to three levels of any link, with odd bandwidths, uplinks and degraded units."""
    levels, count = [], 1
    for i in range(draw(st.integers(1, 3))):
        link = draw(st.sampled_from(["switch", "switch", "ring", "torus", "mesh", "full"]))
        if link in ("torus", "mesh"):
            shape = draw(st.sampled_from([(2, 2), (2, 3), (4,), (3, 2), (1, 4)]))
        else:
            shape = (draw(st.integers(1, 5)),)
        size = math.prod(shape)
        if count * size > most:
            continue
        count *= size
        degraded = {draw(st.integers(0, count - 1)): draw(st.sampled_from([0.5, 0.25]))} if draw(st.booleans()) else {}
        levels.append(
            Level(
                f"l{i}",
                size,
                link,
                draw(st.sampled_from([1e9, 3e9, 8e9])),
                draw(st.sampled_from([0.0, 2e-6, 5e-6])),
                draw(st.integers(1, 3)),
                shape if link in ("torus", "mesh") else (),
                degraded=tuple(degraded.items()),
            )
        )
    if not levels:
        levels = [Level("l0", 2, "switch", 1e9, 0.0)]
    return Topology("any", tuple(levels))


@st.composite
def under_library(draw, topology, slow=False):
    """The topology under any library, with one of its levels as the node; slow ports where they may be."""
    j = draw(st.integers(0, len(topology.levels) - 1))
    levels, count = [], 1
    for level in topology.levels:
        count *= level.size
        ports = ((draw(st.integers(0, count - 1)), level.uplinks - 1, 0.5),)
        ports = ports if slow and level.link == "switch" and level.uplinks > 1 and draw(st.booleans()) else ()
        levels.append(replace(level, reduces=level.link == "switch" and draw(st.booleans()), slow_ports=ports))
    levels[j] = replace(levels[j], name="node")
    return replace(topology, levels=tuple(levels), library=draw(st.sampled_from(libraries())))


def railed(library="nccl", pods=2, nodes=4, gpus=8, uplinks=8, leaf=GB, **more):
    """Pods whose nodes have their NICs on leaf switches of their own."""
    return Topology(
        "railed",
        (
            Level("pod", pods, "switch", leaf, 9e-6, uplinks, rails=True, **more),
            Level("node", nodes, "switch", 2 * GB, 5e-6, uplinks),
            Level("gpu", gpus, "switch", 9 * GB, 1e-6),
        ),
        library=library,
    )


@st.composite
def grouped(draw, topology):
    """Disjoint groups of one size over the devices of a topology, in random order, with bytes."""
    n = topology.size
    k = draw(st.integers(1, n))
    ids = draw(st.permutations(range(n)))
    members = np.array(ids[: n // k * k], dtype=np.int64).reshape(-1, k)
    nbytes = np.array(draw(st.lists(st.integers(1, 1000), min_size=len(members), max_size=len(members))), float) * 1e3
    return members, nbytes


def port(topology, i, device):
    """Of the ports of its unit of switch level i the one that a device has, and how many there are; rails are NICs."""
    while topology.levels[i].rails:
        i += 1
    stride = topology.strides[i]
    ways = min(topology.levels[i].uplinks, stride)
    return device % stride * ways // stride, ways


def leaves(topology, i, a, b):
    """Whether a message leaves its unit of level i; on rails also its leaf, where it leaves its node."""
    strides = topology.strides
    if not topology.levels[i].rails or a // strides[i] != b // strides[i]:
        return a // strides[i] != b // strides[i]
    return a // strides[i + 1] != b // strides[i + 1] and port(topology, i, a) != port(topology, i, b)


def outermost(topology, a, b):
    """The outermost level that a message leaves."""
    return next(i for i in range(len(topology.levels)) if leaves(topology, i, a, b))


def route(topology, sender, receiver):
    """Resources of one message, hop by hop, by plain loops: (level, unit, kind) -> bytes per second."""
    j = outermost(topology, sender, receiver)
    used = []
    for i, level in enumerate(topology.levels):
        out, into = sender // topology.strides[i], receiver // topology.strides[i]
        if i < j or (i > j and level.link != "switch"):
            continue
        factor = dict(level.degraded)
        if level.link == "switch":
            for kind, unit, device in (("out", out, sender), ("in", into, receiver)):
                own, ways = port(topology, i, device)
                used.append(((i, unit, kind, own), level.bandwidth * level.uplinks / ways * factor.get(unit, 1.0)))
            continue
        if level.link == "full":
            factor_here = min(factor.get(out, 1.0), factor.get(into, 1.0))
            used.append(((i, out, into), level.bandwidth * level.uplinks * factor_here))
            continue
        base = out // level.size * level.size
        here = list(np.unravel_index(out - base, level.extents))
        there = list(np.unravel_index(into - base, level.extents))
        for dim, extent in enumerate(level.extents):
            while here[dim] != there[dim]:
                ahead = (there[dim] - here[dim]) % extent
                step = 1 if 2 * ahead <= extent else -1
                if level.link == "mesh":
                    step = 1 if there[dim] > here[dim] else -1
                before = base + int(np.ravel_multi_index(here, level.extents))
                here[dim] = (here[dim] + step) % extent
                after = base + int(np.ravel_multi_index(here, level.extents))
                rate = level.bandwidth * level.uplinks * min(factor.get(before, 1.0), factor.get(after, 1.0))
                used.append(((i, before, after, dim, step), rate))
    return used


def transfer(topology, messages):
    """Bandwidth seconds of (sender, receiver, bytes), by plain loops."""
    load, rates = defaultdict(float), {}
    for sender, receiver, nbytes in messages:
        if sender != receiver:
            for resource, rate in route(topology, sender, receiver):
                load[resource] += nbytes
                rates[resource] = rate
    return max((load[r] / rates[r] for r in load), default=0.0)


def pairs(members, nbytes):
    """The messages of a pairwise all-to-all."""
    k = members.shape[1]
    return [
        (int(a), int(b), w / k)
        for row, w in zip(members, nbytes, strict=True)
        for a, b in itertools.permutations(row, 2)
    ]


@st.composite
def placed(draw):
    """Placements of two axes on any topology, under any library, in any order."""
    topology = draw(under_library(draw(any_topology()), slow=True))
    n = topology.size
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    a = draw(st.sampled_from(divisors))
    found = draw(st.sampled_from(list(placements(Mesh(a=a, b=n // a), topology))))
    return draw(st.sampled_from(list(orders(found))))
