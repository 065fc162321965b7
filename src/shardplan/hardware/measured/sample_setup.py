"""What a sample ran on and did, in our terms: its topology, and its pattern of communication.

A row names no preset: the device and the links inside a node are those of its GPU, the level `node` has as many nodes
and NICs as the row says, and the latency and the delivered share of the NICs' rate are those of its system
(`systems.toml`). Where fewer GPUs took part than a node has, they are the first of every node, and the node keeps its
links and NICs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardplan.core.pattern import Groups, Messages, Pattern
from shardplan.errors import TopologyError, excerpt
from shardplan.hardware.measured.samples import Sample
from shardplan.hardware.prices.library import libraries
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import parse_seconds

# The preset whose device, and whose links inside a node, a GPU stands for.
GPUS = {
    "V100": "dgx2-v100-32g",
    "A100": "dgx-a100",
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "dgx-b200",
    "B300": "dgx-b300",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "MI250X": "mi250x",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
}
# By nccl-tests' name the collective as `Groups.kind`; sendrecv is none, each rank sends to the next.
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
OPS = (*KINDS, "sendrecv")
_SYSTEMS = Path(__file__).parent / "systems.toml"


class System(NamedTuple):
    """What a cluster's fabric is known for."""

    latency: float  # seconds of a message between nodes
    efficiency: float  # part of the NICs' rate that it delivers


@cache
def systems() -> dict[str, System]:
    """Return the known systems, `default` among them, which stands for all others."""
    data = tomllib.loads(_SYSTEMS.read_text(encoding="utf-8"))
    return {name: System(parse_seconds(row["latency"]), float(row["efficiency"])) for name, row in data.items()}


def unknown_systems(samples: Iterable[Sample]) -> list[str]:
    """Return the systems of several nodes that are not known, sorted: their rows are priced by the default."""
    return sorted({s.system for s in samples if s.nodes > 1 and s.system not in systems()})


def topology_of_sample(sample: Sample) -> Topology:
    """Return the topology that a sample ran on; raises `TopologyError` for an unknown GPU or library, and no room.

    >>> row = {"id": "x", "library": "nccl", "op": "all_reduce", "gpu": "H100", "nbytes": 1024, "seconds": 1e-4}
    >>> sample = Sample(**row, nodes=2, gpus_per_node=4, nics_per_node=8, nic_gbps=400)
    >>> topology_of_sample(sample).describe()
    'node=2 x gpu=8'
    """
    if sample.gpu not in GPUS:
        raise TopologyError(f"GPU {excerpt(sample.gpu)} is unknown; legal: {', '.join(GPUS)}")
    if sample.library_name not in libraries():
        raise TopologyError(f"library {excerpt(sample.library_name)} is unknown; legal: {', '.join(libraries())}")
    preset = Topology.load(GPUS[sample.gpu])
    j = preset.index("node")
    room, wanted = preset.strides[j], sample.groups * sample.gpus_per_node
    if wanted > room:
        raise TopologyError(f"{wanted} GPUs of a node take part; a node of {preset.name!r} has {room}")
    node = replace(preset.levels[j], size=sample.nodes)
    if sample.nodes > 1:
        system = systems().get(sample.system, systems()["default"])
        node = replace(
            node,
            uplinks=sample.nics_per_node,
            bandwidth=sample.nic_gbps / 8 * 1e9,
            latency=system.latency,
            efficiency=system.efficiency,
        )
    return replace(preset, levels=(node, *preset.levels[j + 1 :]), library=sample.library_name)


def pattern_of_sample(sample: Sample, topology: Topology) -> Pattern:
    """Return what a sample communicates on its topology; raises `TopologyError` for an unknown op and a single member.

    Source: nccl-tests: `bytes` are those of the larger buffer, and sendrecv is a ring of messages.
    """
    if sample.op not in OPS:
        raise TopologyError(f"op {excerpt(sample.op)} is unknown; legal: {', '.join(OPS)}")
    if sample.members == 1:
        raise TopologyError("a group of one GPU sends nothing")
    first = np.arange(sample.nodes) * topology.strides[0]
    inside = np.arange(sample.groups * sample.gpus_per_node).reshape(sample.groups, 1, sample.gpus_per_node)
    members = (inside + first[:, None]).reshape(sample.groups, sample.members)
    if sample.op not in KINDS:
        following = np.roll(members, -1, axis=1).reshape(-1)
        return Messages(members.reshape(-1), following, np.full(members.size, float(sample.nbytes)))
    held = sample.nbytes / (sample.members if sample.op == "all_gather" else 1)
    return Groups(KINDS[sample.op], members, np.full(sample.groups, held))
