"""Which unit of the topology a host is: by Slurm's `topology.conf`, else by the hosts' names; and Slurm's allocations.

A hostfile lists hosts as ranks take them. Where they stand is said by the switches of `topology.conf`, leaf by leaf; a
cluster without one numbers its hosts as they stand, so that names count: `h2` before `h10`.

Source: SchedMD/slurm `topology.conf` (tree and block), and the environment of `srun` and `sbatch`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardplan.errors import ParseError, TopologyError, excerpt
from shardplan.hardware.topology import Topology
from shardplan.launches.hostfile import Hosts, host_level, hosts_of
from shardplan.launches.launch import count_units

NODELIST, SPREAD = ("SLURM_JOB_NODELIST", "SLURM_NODELIST"), "SLURM_DISTRIBUTION"
_WORD = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True, slots=True)
class LeafSwitch:
    """A leaf of `topology.conf`: a switch, or a block, and its hosts in order."""

    name: str
    hosts: tuple[str, ...]


def parse_switches(text: str, source: str = "topology.conf") -> tuple[LeafSwitch, ...]:
    r"""Return the leaf switches of a `topology.conf`, those under one switch in a row.

    Raises `ParseError` for a line of another form, a switch that is named and not there or is inside itself, and a host
    that hangs on two.

    >>> [s.hosts for s in parse_switches("SwitchName=a Nodes=h[0-1]\nSwitchName=b Nodes=h2\nSwitchName=t Switches=b,a")]
    [('h2',), ('h0', 'h1')]
    """
    leaves: dict[str, tuple[str, ...]] = {}
    inner: dict[str, list[str]] = {}
    of: dict[str, str] = {}
    for number, row in enumerate(text.splitlines(), 1):
        code, at = row.partition("#")[0].strip(), f"{source}, line {number}"
        if not code or code.lower().startswith("blocksizes="):
            continue
        words = {key.lower(): value for key, value in _WORD.findall(code)}
        name = words.get("switchname") or words.get("blockname")
        kind = next((k for k in ("nodes", "switches") if k in words), None)
        if name is None or kind is None:
            raise ParseError(
                f"{at}: {excerpt(code)}; legal are 'SwitchName=s Nodes=h[0-3]', 'SwitchName=t Switches=s,u' and "
                "'BlockName=b Nodes=h[0-3]'"
            )
        if name in leaves or name in inner:
            raise ParseError(f"{at}: switch {name!r} stands twice; legal is once")
        listed = hosts_of(words[kind], at)
        if kind == "switches":
            inner[name] = listed
            continue
        leaves[name] = tuple(listed)
        for host in listed:
            if of.setdefault(host, name) != name:
                raise ParseError(f"{at}: host {host!r} hangs on switch {of[host]!r} too; legal is one leaf switch")
    below = {child for children in inner.values() for child in children}
    found: list[LeafSwitch] = []

    def descend(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ParseError(f"{source}: switch {name!r} is inside itself")
        if name in leaves:
            found.append(LeafSwitch(name, leaves[name]))
            return
        if name not in inner:
            raise ParseError(f"{source}: there is no switch {name!r}; legal are {', '.join([*leaves, *inner])}")
        for child in inner[name]:
            descend(child, (*above, name))

    for name in (*inner, *leaves):
        if name not in below:
            descend(name, ())
    if not found:
        raise ParseError(f"{source}: names no host, or only switches that are inside each other")
    return tuple(found)


def order_by_name(names: Sequence[str]) -> tuple[str, ...]:
    """Return hosts in the order of their names, the numbers in them as numbers.

    >>> order_by_name(["h10", "h9", "a1"])
    ('a1', 'h9', 'h10')
    """

    def key(name: str) -> list[tuple[int, int, str]]:
        parts = (part for part in re.split(r"(\d+)", name) if part)
        return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]

    return tuple(sorted(names, key=key))


def order_by_switch(names: Sequence[str], switches: Sequence[LeafSwitch], topology: Topology) -> tuple[str, ...]:
    """Return hosts leaf switch by leaf switch, as they are the units of a topology.

    Raises `TopologyError` for a host that no switch has, and where the topology has a level above hosts whose units are
    not the leaf switches: then it is of another cluster, or of one with holes.
    """
    wanted = {*names}
    groups = [(s.name, [host for host in s.hosts if host in wanted]) for s in switches]
    found = [host for _, group in groups for host in group]
    if lost := sorted(wanted - {*found}):
        raise TopologyError(f"host {lost[0]!r} hangs on no switch; switches: {', '.join(s.name for s in switches)}")
    j = host_level(topology, len(names))
    if j > 0:
        each, level = topology.levels[j].size, topology.levels[j - 1].name
        for name, group in groups:
            if len(group) % each:
                raise TopologyError(
                    f"switch {name!r} has {count_units(len(group), 'host')} of the launch, and {level}s of "
                    f"{topology.describe()} have {each} each; legal is a topology whose {level}s are the leaf switches"
                )
    return tuple(found)


def stand_hosts(hosts: Hosts, units: Sequence[str]) -> Hosts:
    r"""Return hosts with their ranks as they are, numbered as the units that they are.

    >>> from shardplan.launches.hostfile import parse_hostfile
    >>> stand_hosts(parse_hostfile("b slots=1\na slots=1"), ("a", "b")).ranks
    ((1, 0), (0, 0))
    """
    number = {name: k for k, name in enumerate(units)}
    place = [number[name] for name in hosts.names]
    slots = [0] * len(units)
    for k, n in zip(place, hosts.slots, strict=True):
        slots[k] = n
    ranks = tuple((place[host], slot) for host, slot in hosts.ranks)
    order = () if ranks else tuple(place[k] for k in hosts.order or range(len(place)))
    return Hosts(tuple(units), tuple(slots), ranks, hosts.source, order)


def read_allocation(environment: Mapping[str, str]) -> tuple[Hosts, str | None]:
    """Return the hosts of the Slurm job that this runs in, in Slurm's order, and how ranks are spread: block or cyclic.

    Raises `ParseError` where it runs in none, and for another way of spreading.

    >>> hosts, spread = read_allocation({"SLURM_JOB_NODELIST": "h[0-2]", "SLURM_DISTRIBUTION": "cyclic:block"})
    >>> hosts.names, spread
    (('h0', 'h1', 'h2'), 'cyclic')
    """
    listed = next((environment[name] for name in NODELIST if environment.get(name)), None)
    if listed is None:
        raise ParseError(f"--hostfile slurm: {NODELIST[0]} is not set; legal is inside a job of Slurm, or a hostfile")
    names = tuple(dict.fromkeys(hosts_of(listed, NODELIST[0])))
    spread = (environment.get(SPREAD) or "").split(":")[0].split(",")[0].lower()
    if spread not in ("", "block", "cyclic"):
        raise ParseError(f"{SPREAD}={excerpt(spread)}; legal are block and cyclic, or --rank-order with a file")
    return Hosts(names, (0,) * len(names), (), NODELIST[0], tuple(range(len(names)))), spread or None
