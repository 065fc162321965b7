"""`Cluster`: a topology as network namespaces, bridges and shaped links, and the commands that build it.

A leaf is a rank in a namespace of its own (`leaf="ns"`), or a node whose ranks share its shaped loopback (`leaf="lo"`,
half duplex); every inner unit, and the root, is a namespace with a bridge; every link is a veth pair with a `tbf` on
both ends, so that both directions have the full rate. Any depth. A bucket of at most 64 KiB would make the kernel split
packets; a smaller limit loses them, a larger one is slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from shardplan.errors import ParseError, TopologyError
from shardplan.hardware.level import Level
from shardplan.hardware.topology import Topology
from shardplan.simulation.replay import Constants
from shardplan.simulation.tree import Tree

Leaf = Literal["ns", "lo"]
BUCKET = 80 * 2**10  # bytes of the tbf bucket, above the largest packet
LIMIT = 2**20  # bytes that may queue in a tbf: less loses packets, more lets them wait
LARGEST_PACKET = 64 * 2**10  # gso_max_size: what the kernel may hand to a shaper at once
MTU = 1500  # bytes of a packet on a link, as Ethernet has it: `CONSTANTS` knows its headers
LOOPBACK_MTU = 16384
CONGESTION_CONTROL = "cubic"
MOST_RANKS = 256  # each a process with torch in it
SUBNET = 250  # leaves whose addresses differ in the last number, which ends at 254
BITS = 8  # of a byte: the kernel and the command line count bits a second
# What the emulation adds to bandwidth, fixed before anything was measured: 1448 bytes of payload in a frame of 1514.
CONSTANTS = Constants(latency=3e-4, payload_share=1448 / 1514, bucket=BUCKET)
_NAMES = ("pod", "node", "rank")
_AGEING = 36_000_000  # hundredths of a second: bridges must not forget, and flood, in a long session


@dataclass(frozen=True)
class Cluster:
    """A cluster that the lab can build; raises `TopologyError` for another kind of level, or too many ranks.

    >>> Cluster.of("2x4", (200, 1000)).topology.describe()
    'node=2 x rank=4'
    """

    topology: Topology  # levels that are switches with one uplink; a rank for every device
    leaf: Leaf = "ns"  # what a leaf is: see the module
    tree: Tree = field(init=False, repr=False)  # the links, as the simulation has them

    def __post_init__(self) -> None:
        """Check, and lay out the links."""
        if self.leaf not in get_args(Leaf):
            raise TopologyError(f"leaf={self.leaf!r}; legal are {', '.join(get_args(Leaf))}")
        if self.topology.size > MOST_RANKS:
            raise TopologyError(f"{self.topology.size} ranks; the lab runs a process for each, at most {MOST_RANKS}")
        object.__setattr__(self, "tree", Tree(self.topology, shared=self.leaf == "lo"))

    @staticmethod
    def of(sizes: str, rates: tuple[float, ...], leaf: Leaf = "ns") -> Cluster:
        """Return a cluster from its sizes, such as `"2x4"`, and the rate of every level, in Mbit/s, outermost first.

        Raises:
            ParseError: `sizes` is no product of integers.
            TopologyError: As many rates as levels are needed, each positive.
        """
        try:
            counts = [int(n) for n in sizes.split("x")]
        except ValueError:
            raise ParseError(f"cluster {sizes!r}; legal are sizes, outermost first, such as '2x4'") from None
        if len(counts) != len(rates):
            raise TopologyError(
                f"cluster {sizes!r} has {len(counts)} levels, but {len(rates)} rates are given: "
                f"{', '.join(f'{r:g}' for r in rates)}; one a level, in Mbit/s, outermost first"
            )
        names = _NAMES[-len(counts) :] if len(counts) <= len(_NAMES) else [f"level{k}" for k in range(len(counts))]
        levels = [Level(n, k, "switch", r * 1e6 / BITS, 0.0) for n, k, r in zip(names, counts, rates, strict=True)]
        return Cluster(Topology(f"lab {sizes}", tuple(levels)), leaf)

    @property
    def ranks(self) -> int:
        """The number of ranks, which are the topology's devices."""
        return self.topology.size

    def home(self, rank: int) -> str:
        """Return the name of the namespace of a rank."""
        return _leaf(rank // self._per_leaf)

    @property
    def _per_leaf(self) -> int:
        return self.topology.level_sizes[-1] if self.leaf == "lo" else 1

    def interface(self) -> str:
        """Return the interface whose address the ranks use."""
        return "lo" if self._alone else "up"

    @property
    def _alone(self) -> bool:
        """Whether all ranks share one loopback, and there is no other link."""
        return self.leaf == "lo" and len(self.topology.levels) == 1

    def meters(self) -> tuple[tuple[str, str], ...]:
        """Return, for every edge of the tree, the namespace and the interface whose sent bytes are the edge's."""
        return tuple(self._ends(e.level, e.unit)[e.way] for e in self.tree.edges)

    def _ends(self, j: int, unit: int) -> dict[str, tuple[str, str]]:
        """By way, the namespace and the interface from which a link of a unit of level j is sent on."""
        return {
            "up": (self._vertex(j, unit), "up"),
            "down": (self._vertex(j - 1, unit // self.topology.level_sizes[j]), f"d{unit}"),
            "local": (_leaf(unit), "lo"),
        }

    def _vertex(self, j: int, unit: int) -> str:
        """The namespace of a unit of level j; of level -1 there is one, the root."""
        leaves = len(self.topology.levels) - 1 - (self.leaf == "lo")
        return _leaf(unit) if j == leaves else f"s{j + 1}_{unit}"

    def commands(self) -> list[tuple[str, str, str]]:
        """Return what builds it, in order: the tool (`ip`, `tc`), the namespace ("" for the outer), and its batch."""
        spaces = {name for name, _ in self.meters()}
        outer = [f"netns add {name}" for name in sorted(spaces)]
        inner: dict[str, list[str]] = {}
        shapers: dict[str, list[str]] = {}
        leaves = {self.home(r) for r in range(self.ranks)}
        for name in sorted(spaces - leaves):
            inner[name] = [
                f"link add name hub type bridge ageing_time {_AGEING} stp_state 0 forward_delay 0 mcast_snooping 0",
                "link set dev hub addrgenmode none up",
            ]
        for edge, (space, device) in zip(self.tree.edges, self.meters(), strict=True):
            rate = max(1, round(edge.bandwidth * BITS))
            shapers.setdefault(space, []).append(
                f"qdisc add dev {device} root tbf rate {rate}bit burst {BUCKET} limit {LIMIT}"
            )
            if edge.way == "local":
                inner.setdefault(space, []).append(f"link set dev lo mtu {LOOPBACK_MTU} gso_max_size {LARGEST_PACKET}")
                continue
            master = "" if space in leaves else " master hub"
            inner.setdefault(space, []).append(
                f"link set dev {device} addrgenmode none mtu {MTU} gso_max_size {LARGEST_PACKET}{master} up"
            )
            if edge.way == "up":
                ends = self._ends(edge.level, edge.unit)
                outer.append(f"link add name up netns {ends['up'][0]} type veth peer name d{edge.unit} netns "
                             f"{ends['down'][0]}")  # fmt: skip
        for number, name in enumerate(sorted(leaves, key=lambda n: int(n[1:]))):
            inner.setdefault(name, []).append("link set dev lo up")
            inner[name] += self._routes(number)
        return [
            ("ip", "", "\n".join(outer)),
            *(("ip", name, "\n".join(lines)) for name, lines in inner.items()),
            *(("tc", name, "\n".join(lines)) for name, lines in shapers.items()),
        ]

    def _routes(self, leaf: int) -> list[str]:
        """What gives a leaf its address, with the congestion control of every route to and from it."""
        control = f"congctl {CONGESTION_CONTROL}"
        if self._alone:
            local = "127.0.0.0/8 dev lo proto kernel scope host src 127.0.0.1"
            host = "127.0.0.1 dev lo proto kernel scope host src 127.0.0.1"
            return [f"route replace table local local {x} {control}" for x in (local, host)]
        own = f"10.0.{leaf // SUBNET}.{leaf % SUBNET + 1}"
        return [
            f"addr add {own}/16 dev up",
            f"route replace 10.0.0.0/16 dev up proto kernel scope link src {own} {control}",
            f"route replace table local local {own} dev up proto kernel scope host src {own} {control}",
        ]


def _leaf(number: int) -> str:
    return f"r{number}"
