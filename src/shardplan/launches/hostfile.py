"""Hostfiles and rankfiles: which rank runs on which device, read and written.

A host is a unit of a level, the level called `node` where there is one; the hosts' order in a hostfile is the order of
the units. Read are Open MPI's hostfile (`host slots=n`, as DeepSpeed has it too; lines of one host add up), MPICH's
(`host:n`) and plain lists (`host`), of which each line takes its ranks in turn, so a host may come again; and Open
MPI's rankfile (`rank r=host slot=s`) or rows `rank host local_rank`. A slot is the number of a device on its host; of
slots `socket:core` those of a host number its devices in their order. Where a hostfile has a host it may have a list as
Slurm writes it, `h[00-03,07],g1`: as many lines. Comments run from '#' to the end of the line.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.errors import ParseError, TopologyError, excerpt
from shardplan.hardware.topology import Topology
from shardplan.launches.launch import Launch, count_units

_HOST = r"[A-Za-z0-9_][A-Za-z0-9_.@-]*"
_LISTED = r"[A-Za-z0-9_][A-Za-z0-9_.@,\[\]-]*"  # hosts, several with commas between and numbers in brackets
_LINE = re.compile(rf"(?P<host>{_LISTED})(?::(?P<count>\d{{1,9}}))?(?P<words>(?:\s+[A-Za-z_-]+\s*=\s*\S+)*)")
_WORD = re.compile(r"([A-Za-z_-]+)\s*=\s*(\S+)")
_RANK = re.compile(rf"rank\s+(?P<rank>\d{{1,9}})\s*=\s*(?P<host>\+n\d{{1,9}}|{_HOST})\s+slots?\s*=\s*(?P<slot>\S+)")
_ROW = re.compile(rf"(?P<rank>\d{{1,9}})\s+(?P<host>{_HOST})\s+(?P<slot>\d{{1,9}})")
_SLOT = re.compile(r"(\d{1,9})(?::(\d{1,9})(?:-\d+)?)?")
_LEGAL = "'host slots=n' (Open MPI), 'host:n' (MPICH) or 'host'"
MOST_HOSTS = 65536  # of one line
MOST_RANKS = 2**22  # of a file
_MOST_DIGITS = 9  # of a number


@dataclass(frozen=True, slots=True)
class Hosts:
    """Which host every rank runs on, and as which of its ranks."""

    names: tuple[str, ...]  # each once
    slots: tuple[int, ...]  # of each host; 0 where the file does not say
    ranks: tuple[tuple[int, int], ...]  # of every rank its host's number and its device there; empty where left open
    source: str = "hostfile"  # name of the file, for messages
    # Where ranks are left open, the hosts in the order in which they take them, all their devices each; that of `names`
    # by default.
    order: tuple[int, ...] = ()


class _HostLine(NamedTuple):
    """A line of a hostfile."""

    number: int
    host: str
    form: str  # `plain`, `slots=` or `:n`
    slots: int


class _RankLine(NamedTuple):
    """A line of a rankfile, without its rank."""

    number: int
    host: str
    slot: tuple[int, ...]  # a device's number, or socket and core


def _lines(text: str) -> list[tuple[int, str]]:
    """Numbers and texts of the lines that say something."""
    rows = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in rows if line]


def parse_hostfile(text: str, source: str = "hostfile", hosts: Hosts | None = None) -> Hosts:
    r"""Return the hosts that a hostfile names, in the order in which they are first named, and their ranks.

    There are no ranks where every line is a host without a number and none comes twice: then each host takes as many as
    it has devices. `source` is the file's name, for messages. `hosts` is another hostfile that gives the hosts' order
    on the topology, where this one orders ranks only.

    Raises:
        ParseError: A line that is none of the forms, forms are mixed, or a host that the other hostfile does not name;
            it names the line and says what is legal.
        TopologyError: Hosts of the other hostfile are left out.

    >>> parse_hostfile("b slots=2\na slots=2").ranks
    ((0, 0), (0, 1), (1, 0), (1, 1))
    >>> parse_hostfile("a:1\nb:1\na:1\nb:1").ranks
    ((0, 0), (1, 0), (0, 1), (1, 1))
    """
    found: list[_HostLine] = []
    for number, line in _lines(text):
        at = f"{source}, line {number}"
        match = _LINE.fullmatch(line)
        if match is None:
            raise ParseError(f"{at}: {excerpt(line)} is no host; legal: {_LEGAL}")
        words = dict(_WORD.findall(match["words"]))
        for word in words:
            if word.replace("-", "_") not in ("slots", "max_slots", "port"):
                raise ParseError(f"{at}: {word!r} is unknown; legal: slots, max_slots, port")
        form, count = ("plain", "1")
        if "slots" in words:
            form, count = "slots=", words["slots"]
        elif match["count"] is not None:
            form, count = ":n", match["count"]
        if not count.isdecimal() or len(count) > _MOST_DIGITS or int(count) < 1:
            raise ParseError(f"{at}: {match['host']!r} has {excerpt(count)} slots; legal is a number of 1 or more")
        if found and found[0].form != form:
            first = found[0]
            raise ParseError(
                f"{at}: {line!r} is of the form {form!r}, line {first.number} of the form {first.form!r}; legal is "
                f"one form in a file: {_LEGAL}"
            )
        for host in hosts_of(match["host"], at):
            if hosts is not None and host not in hosts.names:
                raise ParseError(f"{at}: host {host!r} is not in {hosts.source}; legal: {_first_names(hosts.names)}")
            found.append(_HostLine(number, host, form, int(count)))
    if not found:
        raise ParseError(f"{source}: names no host; legal are lines {_LEGAL}")
    if (count := sum(row.slots for row in found)) > MOST_RANKS:
        raise ParseError(f"{source}: has {count} slots; legal are at most {MOST_RANKS}")
    named = tuple(dict.fromkeys(row.host for row in found))
    names = named if hosts is None else hosts.names
    if found[0].form == "plain" and len(named) == len(found):
        if len(named) < len(names) and hosts is not None:
            raise TopologyError(
                f"{source} names {len(named)} of the {len(names)} hosts of {hosts.source}; legal are all of them, each "
                "once, or a line for every rank"
            )
        return Hosts(names, (0,) * len(names), (), source, tuple(names.index(name) for name in named))
    total = dict.fromkeys(named, 0)
    for row in found:
        total[row.host] += row.slots
    # Open MPI adds up the lines of a host; elsewhere each line takes its ranks in turn.
    runs = list(total.items()) if found[0].form == "slots=" else [(row.host, row.slots) for row in found]
    ranks: list[tuple[int, int]] = []
    used = dict.fromkeys(names, 0)
    number_of = {name: k for k, name in enumerate(names)}
    for host, n in runs:
        ranks += [(number_of[host], used[host] + k) for k in range(n)]
        used[host] += n
    return Hosts(names, tuple(total.get(name, 0) for name in names), tuple(ranks), source)


def hosts_of(text: str, at: str = "hosts") -> list[str]:
    """Return the hosts of a list as Slurm writes it, in order; `at` says in an error where it stands.

    Names have commas between them, and brackets hold numbers and ranges of numbers with leading zeros.

    Raises `ParseError` where it is malformed or has more than `MOST_HOSTS`.

    >>> hosts_of("h[00-02,07],g1")
    ['h00', 'h01', 'h02', 'h07', 'g1']
    """
    found: list[str] = []
    legal = "legal is such as h[00-03,07],g1"
    for part in re.split(r",(?![^\[]*\])", text):
        choices: list[list[str]] = []
        for k, piece in enumerate(re.split(r"\[([^\[\]]*)\]", part)):
            choices.append([piece] if k % 2 == 0 else _numbers(piece, f"{at}: {text!r}"))
        if math.prod(map(len, choices)) + len(found) > MOST_HOSTS:
            raise ParseError(f"{at}: {text!r} is more than {MOST_HOSTS} hosts")
        found += map("".join, itertools.product(*choices))
    wrong = next((name for name in found if re.fullmatch(_HOST, name) is None), None)
    if wrong is not None:
        raise ParseError(f"{at}: {text!r} names {wrong!r}, which is no host; {legal}")
    return found


def _numbers(text: str, at: str) -> list[str]:
    """What stands in brackets, `00-03,07`: numbers as wide as they are written."""
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        numbers = first.isdecimal() and last.isdecimal() and len(first + last) <= 2 * _MOST_DIGITS
        if not (numbers and int(first) <= int(last) < int(first) + MOST_HOSTS):
            raise ParseError(f"{at}: {part!r} is no range of numbers; legal is such as 00-03")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def parse_rankfile(text: str, source: str = "rankfile", hosts: Hosts | None = None) -> Hosts:
    r"""Return the hosts of a rank order, which gives every rank its host and its device there, and the ranks.

    Lines are `rank r=host slot=s`, where `+n2` is the third host of the hostfile; or `rank host local_rank`. A slot may
    be `socket:core`, the first of several cores too: those of a host number its devices in their order. `source`
    is the file's name, for messages. `hosts` is what a hostfile says; it gives the hosts' order, else the order in
    which ranks name them does.

    Raises:
        ParseError: A line of another form, a rank or a slot that stands twice, a rank that is missing, or a host that
            the hostfile does not name; it names the line and says what is legal.

    >>> parse_rankfile("rank 1=a slot=0\nrank 0=b slot=0").names
    ('b', 'a')
    """
    legal = "'rank 0=host slot=0' or '0 host 0', slot a device's number on its host"
    table: dict[int, _RankLine] = {}
    holder: dict[tuple[str, tuple[int, ...]], int] = {}
    for number, line in _lines(text):
        at = f"{source}, line {number}"
        match = _RANK.fullmatch(line) or _ROW.fullmatch(line)
        if match is None:
            raise ParseError(f"{at}: {excerpt(line)} places no rank; legal: {legal}")
        rank, host, said = int(match["rank"]), match["host"], match["slot"]
        form = _SLOT.fullmatch(said)
        if form is None:
            raise ParseError(
                f"{at}: slot {excerpt(said)} is no number; legal is one, the device's number on {host!r}, or "
                "socket:core"
            )
        slot = tuple(int(n) for n in form.groups() if n is not None)
        if table and len(slot) != len(next(iter(table.values())).slot):
            raise ParseError(f"{at}: slot {said!r} is of another form than those before; legal is one in a file")
        if host.startswith("+n"):
            if hosts is None or int(host[2:]) >= len(hosts.names):
                have = f"has {len(hosts.names)} hosts" if hosts is not None else "is not given"
                raise ParseError(f"{at}: {host!r} counts hosts of the hostfile, which {have}; legal is a host's name")
            host = hosts.names[int(host[2:])]
        if rank in table:
            raise ParseError(f"{at}: rank {rank} stands in line {table[rank].number} already; each rank stands once")
        if hosts is not None and host not in hosts.names:
            raise ParseError(f"{at}: host {host!r} is not in {hosts.source}; legal: {_first_names(hosts.names)}")
        other = holder.setdefault((host, slot), rank)
        if other != rank:
            raise ParseError(
                f"{at}: slot {said} of {host!r} holds rank {other} (line {table[other].number}) already; legal is "
                "one rank a slot"
            )
        table[rank] = _RankLine(number, host, slot)
    if not table:
        raise ParseError(f"{source}: places no rank; legal: {legal}")
    missing = next((r for r in range(len(table)) if r not in table), None)
    if missing is not None:
        raise ParseError(f"{source}: rank {missing} is missing of {len(table)}; legal are the ranks 0 to n - 1")
    rows = [table[r] for r in range(len(table))]
    names = hosts.names if hosts is not None else tuple(dict.fromkeys(row.host for row in rows))
    number_of = {name: k for k, name in enumerate(names)}
    slots = [0] * len(names)
    ranks: list[tuple[int, int]] = []
    cores: dict[str, list[tuple[int, ...]]] = {}
    for host, slot in sorted(holder):
        cores.setdefault(host, []).append(slot)
    for row in rows:
        device = row.slot[0] if len(row.slot) == 1 else cores[row.host].index(row.slot)
        slots[number_of[row.host]] = max(slots[number_of[row.host]], device + 1)
        ranks.append((number_of[row.host], device))
    return Hosts(names, tuple(slots), tuple(ranks), source)


def _first_names(names: Sequence[str]) -> str:
    """The first 6 of many names, for a message."""
    return ", ".join(names[:6]) + (f", ... ({len(names)} in all)" if len(names) > 6 else "")


def host_level(topology: Topology, hosts: int | None = None) -> int:
    """Return the number of the level whose units are hosts; -1 where the whole topology is one host.

    It is the level called `node` or `host`, else the last but one. Where that has not as many units as there are
    `hosts` (if that is known), it is the innermost level that has. Raises `TopologyError` where none has.

    >>> host_level(Topology.load("dgx-a100"))
    0
    """
    names = [level.name for level in topology.levels]
    named = next((j for j, name in enumerate(names) if name in ("node", "host")), len(names) - 2)
    if hosts is None or _units(topology, named) == hosts:
        return named
    others = [j for j in range(-1, len(names)) if _units(topology, j) == hosts]
    if others:
        return others[-1]
    have = count_units(_units(topology, named), names[named] if named >= 0 else "host")
    raise TopologyError(
        f"{count_units(hosts, 'host')}, but topology {topology.name!r} has {have} ({topology.describe()}); legal is a "
        f"host for each: give the topology its size, as {names[max(named, 0)]}s={hosts}"
    )


def host_size(topology: Topology, hosts: int | None = None) -> int:
    """Return the devices of a host; of `host_level`, which raises as it does."""
    j = host_level(topology, hosts)
    return topology.size if j < 0 else topology.strides[j]


def _units(topology: Topology, j: int) -> int:
    """How many units level j has in all."""
    return 1 if j < 0 else topology.size // topology.strides[j]


def devices_of(hosts: Hosts, topology: Topology) -> tuple[int, ...]:
    r"""Return the topology id of every rank.

    Raises `TopologyError` where hosts, slots or ranks do not suit the topology.

    >>> devices_of(parse_hostfile("a:1\nb:1\na:1\nb:1"), Topology.load("dgx-a100").resize(nodes=2, gpus=2))
    (0, 2, 1, 3)
    """
    room = host_size(topology, len(hosts.names))
    if not hosts.ranks:
        return tuple(host * room + k for host in hosts.order or range(len(hosts.names)) for k in range(room))
    if len(hosts.ranks) != topology.size:
        raise TopologyError(
            f"{hosts.source} places {len(hosts.ranks)} ranks, topology {topology.name!r} has {topology.size} devices "
            f"({topology.describe()}); legal is a rank for each"
        )
    for rank, (host, slot) in enumerate(hosts.ranks):
        if slot >= room:
            raise TopologyError(
                f"{hosts.source} puts rank {rank} on device {slot} of {hosts.names[host]!r}, which has {room} "
                f"({topology.describe()}); legal are 0 to {room - 1}"
            )
    return tuple(host * room + slot for host, slot in hosts.ranks)


def launch_of(
    mesh: Mesh,
    topology: Topology,
    hosts: Hosts | None = None,
    ranks: np.ndarray | None = None,
    by_rank: bool = False,
) -> Launch:
    r"""Return the launch of a program that numbers its mesh itself.

    Args:
        mesh: The axes; its device ids are the ranks at the coordinates, row-major unless `devices` says otherwise.
        topology: The hardware.
        hosts: Where the ranks run; host by host by default.
        ranks: The rank at every coordinate, in the mesh's shape, such as `megatron.order_ranks`; the mesh's by default.
        by_rank: Whether groups list their members by rank, see `Launch`.

    Raises:
        TopologyError: The hosts do not suit the topology, or the mesh does not.

    >>> topology = Topology.load("dgx-a100").resize(nodes=2, gpus=2)
    >>> launch_of(Mesh(data=2, tensor=2), topology, parse_hostfile("a:1\nb:1\na:1\nb:1")).ids
    (0, 2, 1, 3)
    """
    if ranks is not None:
        mesh = Mesh(mesh.shape, devices=ranks.reshape(-1).tolist())
    if mesh.size == topology.size and max(mesh.devices) >= topology.size:
        raise TopologyError(
            f"rank {max(mesh.devices)} of mesh {mesh} runs nowhere: topology {topology.name!r} has {topology.size} "
            f"devices; legal are the ranks 0 to {topology.size - 1}"
        )
    table = tuple(range(topology.size)) if hosts is None else devices_of(hosts, topology)
    if mesh.size != topology.size:
        return Launch(mesh, topology, mesh.devices)  # refuses, and says why
    names = hosts.names if hosts is not None else ()
    return Launch(mesh, topology, tuple(table[r] for r in mesh.devices), names, by_rank)


def host_names(launch: Launch) -> tuple[str, ...]:
    """Return the hosts in the order of their units: those of the launch, else after the level: node0, node1, ..."""
    j = host_level(launch.topology, len(launch.hosts) or None)
    word = launch.topology.levels[j].name if j >= 0 else "host"
    return launch.hosts or tuple(f"{word}{k}" for k in range(_units(launch.topology, j)))


def rankfile_text(device_of_rank: Mapping[int, int], hosts: Sequence[str]) -> str:
    """Return an Open MPI rankfile: a line for every rank, in order; `parse_rankfile` reads it.

    `device_of_rank` has topology ids; the hosts are in the order of the units, all of one size.

    >>> print(rankfile_text({0: 0, 1: 2, 2: 1, 3: 3}, ("a", "b")), end="")
    rank 0=a slot=0
    rank 1=b slot=0
    rank 2=a slot=1
    rank 3=b slot=1
    """
    room = len(device_of_rank) // len(hosts)
    rows = sorted(device_of_rank.items())
    return "".join(f"rank {rank}={hosts[device // room]} slot={device % room}\n" for rank, device in rows)
