"""`Cluster`: a topology as network namespaces that route, joined by shaped links, and the commands that build it.

A leaf is a rank in a namespace of its own (`leaf="ns"`), or a node whose ranks share its shaped loopback (`leaf="lo"`,
half duplex); every inner unit, and the root, is a namespace that forwards. Every link is a veth pair with a `tbf` on
both ends, so that both directions have the full rate; a unit has one for each of its uplinks. What leaves a unit takes
the rail of its sender, what enters one that of its receiver. Any depth. A bucket of at most 64 KiB would make the
kernel split packets; a smaller limit loses them, a larger one is slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from shardplan.errors import ParseError, TopologyError
from shardplan.hardware.level import Level
from shardplan.hardware.topology import Topology
from shardplan.simulation.replay import Constants
from shardplan.simulation.switch_tree import Tree

Leaf = Literal["ns", "lo"]
Rate = float | str  # in Mbit/s; a text may have uplinks before it
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
# Both ends of every link have one address, and none is asked for: what is put on a link arrives at its other end.
_ETHERNET = "02:00:00:00:00:01"
_RAILS = 100  # the first table of routes by rail
_RAILS_PREFERENCE = 40_000  # where those tables are looked up: after all others


@dataclass(frozen=True)
class Cluster:
    """A cluster that the lab can build; raises `TopologyError` for another kind of level, or too many ranks.

    >>> Cluster.of("2x4", ("4*50", 1000)).topology.describe()
    'node=2 x rank=4'
    """

    topology: Topology  # levels that are switches; a rank for every device
    leaf: Leaf = "ns"  # what a leaf is: see the module
    bucket: int = BUCKET  # bytes that a link lets pass at once after a pause: few where messages are small
    tree: Tree = field(init=False, repr=False)  # the links, as the simulation has them

    def __post_init__(self) -> None:
        """Check, and lay out the links."""
        if self.leaf not in get_args(Leaf):
            raise TopologyError(f"leaf={self.leaf!r}; legal are {', '.join(get_args(Leaf))}")
        if self.topology.size > MOST_RANKS:
            raise TopologyError(f"{self.topology.size} ranks; the lab runs a process for each, at most {MOST_RANKS}")
        if any(level.rails for level in self.topology.levels):
            raise TopologyError("a level has rails; the lab builds units of one switch each")
        if not MTU * 2 <= self.bucket <= LIMIT:
            raise TopologyError(f"bucket={self.bucket}; legal are {MTU * 2} to {LIMIT} bytes")
        object.__setattr__(self, "tree", Tree(self.topology, shared=self.leaf == "lo"))

    @staticmethod
    def of(sizes: str, rates: tuple[Rate, ...], leaf: Leaf = "ns") -> Cluster:
        """Return a cluster from its sizes, such as `"2x4"`, and the rate of every level, in Mbit/s, outermost first.

        A rate is a number, or a text such as `"4*50"`: four uplinks of 50 Mbit/s each.

        Raises:
            ParseError: `sizes` is no product of integers, or a rate no number.
            TopologyError: As many rates as levels are needed, each positive.
        """
        try:
            counts = [int(n) for n in sizes.split("x")]
        except ValueError:
            raise ParseError(f"cluster {sizes!r}; legal are sizes, outermost first, such as '2x4'") from None
        if len(counts) != len(rates):
            raise TopologyError(
                f"cluster {sizes!r} has {len(counts)} levels, but {len(rates)} rates are given: "
                f"{rates_text(rates)}; one a level, in Mbit/s, outermost first"
            )
        names = _NAMES[-len(counts) :] if len(counts) <= len(_NAMES) else [f"level{k}" for k in range(len(counts))]
        levels: list[Level] = []
        for name, count, (uplinks, rate) in zip(names, counts, map(_uplinks, rates), strict=True):
            levels.append(Level(name, count, "switch", rate * 1e6 / BITS, 0.0, uplinks=uplinks))
        return Cluster(Topology(f"lab {sizes}", tuple(levels)), leaf)

    @property
    def largest_packet(self) -> int:
        """Bytes that the kernel may hand to a shaper at once: four fifths of the bucket, at most 64 KiB."""
        return min(LARGEST_PACKET, self.bucket * 4 // 5)

    @property
    def rates(self) -> tuple[Rate, ...]:
        """The rate of every level, as `of` takes it."""
        each = [(level.uplinks, level.bandwidth * BITS / 1e6) for level in self.topology.levels]
        return tuple(rate if uplinks == 1 else f"{uplinks}*{rate:g}" for uplinks, rate in each)

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
        return "lo" if self._is_loopback_only else "up"

    @property
    def _is_loopback_only(self) -> bool:
        """Whether all ranks share one loopback, and there is no other link."""
        return self.leaf == "lo" and len(self.topology.levels) == 1

    def meters(self) -> tuple[tuple[str, str], ...]:
        """Return, for every edge of the tree, the namespace and the interface whose sent bytes are the edge's."""
        return tuple(self._ends(e.level, e.unit, e.port)[e.way] for e in self.tree.edges)

    def _ends(self, j: int, unit: int, port: int) -> dict[str, tuple[str, str]]:
        """By way, the namespace and the interface from which a link of a unit of level j is sent on."""
        ways = self.tree.fabric.wires[j].ways
        return {
            "up": (self._vertex(j, unit), f"up{port}" if ways > 1 else "up"),
            "down": (self._vertex(j - 1, unit // self.topology.level_sizes[j]), f"d{unit * ways + port}"),
            "local": (_leaf(unit), "lo"),
        }

    def _vertex(self, j: int, unit: int) -> str:
        """The namespace of a unit of level j; of level -1 there is one, the root."""
        return _leaf(unit) if j == self._leaves else f"s{j + 1}_{unit}"

    @property
    def _leaves(self) -> int:
        """The level whose units are leaves."""
        return len(self.topology.levels) - 1 - (self.leaf == "lo")

    def routers(self) -> tuple[str, ...]:
        """Return the namespaces that forward."""
        return tuple(sorted({space for space, _ in self.meters()} - {self.home(r) for r in range(self.ranks)}))

    def commands(self) -> list[tuple[str, str, str]]:
        """Return what builds it, in order: the tool (`ip`, `tc`), the namespace ("" for the outer), and its batch."""
        outer = [f"netns add {name}" for name in sorted({name for name, _ in self.meters()})]
        inner: dict[str, list[str]] = {}
        shapers: dict[str, list[str]] = {}
        for edge, (space, device) in zip(self.tree.edges, self.meters(), strict=True):
            rate = max(1, round(edge.bandwidth * BITS))
            shapers.setdefault(space, []).append(
                f"qdisc add dev {device} root tbf rate {rate}bit burst {self.bucket} limit {LIMIT}"
            )
            if edge.way == "local":
                inner.setdefault(space, []).append(
                    f"link set dev lo mtu {LOOPBACK_MTU} gso_max_size {self.largest_packet}"
                )
                continue
            inner.setdefault(space, []).append(
                f"link set dev {device} addrgenmode none mtu {MTU} gso_max_size {self.largest_packet} arp off up"
            )
            if edge.way == "up":
                there, other = self._ends(edge.level, edge.unit, edge.port)["down"]
                outer.append(f"link add name {device} address {_ETHERNET} netns {space} type veth "
                             f"peer name {other} address {_ETHERNET} netns {there}")  # fmt: skip
        for number in range(self.ranks // self._per_leaf):
            inner.setdefault(_leaf(number), []).append("link set dev lo up")
            inner[_leaf(number)] += self._routes(number)
        for j in range(-1, self._leaves):
            for unit in range(math.prod(self.topology.level_sizes[: j + 1])):
                inner[self._vertex(j, unit)] += self._forwards(j, unit)
        return [
            ("ip", "", "\n".join(outer)),
            *(("ip", name, "\n".join(lines)) for name, lines in inner.items()),
            *(("tc", name, "\n".join(lines)) for name, lines in shapers.items()),
        ]

    def _forwards(self, j: int, unit: int) -> Iterator[str]:
        """Yield the routes of a unit of level j: into it by the rail of the receiver, out of it by that of the sender.

        What is inside is in the main table; all else falls through to the rules behind it.
        """
        count = self.ranks // self._per_leaf // math.prod(self.topology.level_sizes[: j + 1])  # leaves inside
        for leaf in range(unit * count, (unit + 1) * count):
            device = leaf * self._per_leaf
            _, into = self._ends(j + 1, *self.tree.rail(j + 1, device))["down"]
            yield f"route add {_address(leaf)}/32 dev {into}"
            if j >= 0:
                own, port = self.tree.rail(j, device)
                _, out = self._ends(j, own, port)["up"]
                yield f"route replace default dev {out} table {_RAILS + port}"
                yield f"rule add from {_address(leaf)}/32 lookup {_RAILS + port} pref {_RAILS_PREFERENCE}"

    def _routes(self, leaf: int) -> list[str]:
        """What gives a leaf its address, with the congestion control of every route to and from it."""
        control = f"congctl {CONGESTION_CONTROL}"
        if self._is_loopback_only:
            local = "127.0.0.0/8 dev lo proto kernel scope host src 127.0.0.1"
            host = "127.0.0.1 dev lo proto kernel scope host src 127.0.0.1"
            return [f"route replace table local local {x} {control}" for x in (local, host)]
        own = _address(leaf)
        return [
            f"addr add {own}/16 dev up",
            f"route replace 10.0.0.0/16 dev up proto kernel scope link src {own} {control}",
            f"route replace table local local {own} dev up proto kernel scope host src {own} {control}",
        ]


def rates_text(rates: Sequence[Rate], between: str = ", ") -> str:
    """Return rates one after another; with commas between them `--rates` takes them."""
    return between.join(r if isinstance(r, str) else f"{r:g}" for r in rates)


def _uplinks(rate: Rate) -> tuple[int, float]:
    """The uplinks of a level and the rate of each."""
    count, _, each = rate.rpartition("*") if isinstance(rate, str) else ("", "", rate)
    try:
        return int(count or 1), float(each)
    except ValueError:
        raise ParseError(
            f"rate {rate!r}; legal is a number in Mbit/s, or uplinks and a number, such as '4*50'"
        ) from None


def _address(leaf: int) -> str:
    return f"10.0.{leaf // SUBNET}.{leaf % SUBNET + 1}"


def _leaf(number: int) -> str:
    return f"r{number}"
