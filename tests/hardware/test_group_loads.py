"""The loads of groups and of messages apart add up to those of all together, on every preset."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.topologies import railed
from shardplan.core.pattern import Groups
from shardplan.errors import TopologyError
from shardplan.hardware.level import Level
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric, Flows, Load
from shardplan.hardware.prices.group_loads import Loads, group_loads, resource_starts, routes
from shardplan.hardware.topology import Topology
from shardplan.hardware.topology_file import presets

SLOW = (
    Level("node", 2, "switch", 1e6, 0.0, uplinks=3, degraded=((1, 0.5),), slow_ports=((0, 2, 0.25),)),
    Level("gpu", 6, "torus", 1e7, 0.0, shape=(2, 3), degraded=((7, 0.5),)),
)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")


def small(name: str) -> Topology:
    topology = Topology.load(name)
    if "node" not in [level.name for level in topology.levels]:
        return topology
    return topology.resize(node=2 if topology.strides[0] > 16 else 4)


def structure(topology: Topology) -> tuple[object, ...]:
    """What tells topologies apart here: not their rates."""
    return topology.library, *((one.size, one.link, one.shape, one.uplinks, one.reduces) for one in topology.levels)


# One preset of each structure.
ALIKE = {structure(one): one for one in map(small, presets()) if one.size <= 256}
TOPOLOGIES = [*ALIKE.values(), Topology("slow", SLOW), railed(), railed("ring", nodes=2, gpus=4, uplinks=2)]


def summed(loads: Loads, fabric: Fabric, weight: np.ndarray) -> np.ndarray:
    return np.bincount(loads.resource, loads.seconds * weight[loads.row], resource_starts(fabric)[-1])


def flat(load: Load, fabric: Fabric) -> np.ndarray:
    counts = np.diff(resource_starts(fabric)).tolist()
    return np.concatenate([np.zeros(n) if x is None else x for x, n in zip(load, counts, strict=True)])


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=[t.name for t in TOPOLOGIES])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_apart_add_up(topology: Topology, kind: str) -> None:
    fabric = Fabric(topology)
    n = topology.size
    for inner in {k for k in (2, 4, n // 2, n) if n % k == 0}:
        for ids in (np.arange(n).reshape(-1, inner), np.arange(n).reshape(inner, -1).T):
            pattern = Groups(kind, ids[::-1], np.linspace(1e6, 2e6, len(ids)))
            for algorithm in ("auto", *fabric.library.algorithms()):
                whole = price(pattern, fabric, algorithm)
                assert whole.row is not None
                rounds = group_loads(pattern, whole.row, fabric)
                got = sum(summed(one, fabric, np.ones(len(ids))) for one in rounds)
                assert got == pytest.approx(flat(whole.load, fabric), rel=1e-12), algorithm


@given(st.sampled_from(TOPOLOGIES), st.integers(0, 2**32))
def test_messages_apart_add_up(topology: Topology, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sender, receiver = rng.integers(0, topology.size, (2, 40))
    nbytes = rng.uniform(1, 1e6, 40)
    fabric = Fabric(topology)
    got = summed(routes(fabric, sender, receiver), fabric, nbytes)
    assert got == pytest.approx(flat(fabric.load(Flows(sender, receiver, nbytes)), fabric), rel=1e-9)


def test_too_many_groups_are_an_error() -> None:
    fabric = Fabric(Topology("", (Level("gpu", 1 << 13, "switch", 1.0, 0.0),)))
    pattern = Groups("all_gather", np.arange(1 << 13).reshape(-1, 2), np.ones(1 << 12))
    row = price(pattern, fabric).row
    assert row is not None
    with pytest.raises(TopologyError, match=r"^4096 groups on 8192 devices; the loads of groups are told apart where"):
        group_loads(pattern, row, fabric)
