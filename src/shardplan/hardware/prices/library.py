"""Library models: what a communication library makes of a collective, as a table of rows, each affine in bytes.

A row is one algorithm under one protocol. For the groups of a collective it takes

    seconds = launch + base + near hops * latency * near + far hops * (latency + far) + largest load / rate + own copy

where *far* levels are the level called `node` and those outside it (a NIC is an uplink of a node), *near* ones those
inside it; a rate is the level's bandwidth times its efficiency times the row's share, and a member's own part is copied
at the near rate over `own_copy`. The least over the rows is paid. So a price is monotone in bytes, and the rows of an
op on some groups are lines that a search may fold. Which hops and loads an algorithm has is in `traffic`, tables are
TOML files in `libraries/`, and every number in them is cited there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from shardplan.core import validation
from shardplan.core.decoding import decode_toml
from shardplan.errors import ParseError, TopologyError, excerpt
from shardplan.hardware.toml_fields import basic_string, check_keys, parse_quantity
from shardplan.hardware.units import exact, parse_seconds

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast", "all_to_all")  # as `Groups.kind`
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
SERVED = (*KINDS, "messages")
# What `traffic` knows: an algorithm's hops and loads.
ALGORITHM_NAMES = ("ring", "tree", "nvls", "nvls_tree", "collnet", "network", "p2p")
_TABLES = Path(__file__).parent / "libraries"
_LENGTHS = ("base", "base_far", "far")  # seconds of a row
_NUMBERS = ("near", "near_share", "far_share", "per_member")


@dataclass(frozen=True, slots=True)
class LibraryRow:
    """One algorithm under one protocol: seconds beside those of the topology, and shares of its rates."""

    algorithm: str  # one of `ALGORITHM_NAMES`
    protocol: str  # such as LL; empty where the library has one
    ops: tuple[str, ...]  # of `SERVED`, what it serves
    base: float | None = 0.0  # seconds once, of groups inside a node; None where it serves none
    base_far: float | None = 0.0  # seconds once, of groups over several nodes; None where it serves none
    near: float = 1.0  # of the latency of a level inside a node what a hop over it takes
    far: float = 0.0  # seconds of a hop between nodes, beside the latency of the level it crosses
    near_share: float = 1.0  # of the rate of ports and links inside a node
    far_share: float = 1.0  # of the rate of NICs and of what lies outside them
    members: int = 2  # the least members in a node that it serves
    per_member: float = 0.0  # of an all-reduce's bytes what every member of a node adds to a switch's load
    asked: bool = False  # priced only where its algorithm is asked for by name

    def __post_init__(self) -> None:
        """Refuse an algorithm that nothing is known of, and an op that is none."""
        if self.algorithm not in ALGORITHM_NAMES:
            legal = ", ".join(ALGORITHM_NAMES)
            raise TopologyError(f"library row: algorithm {excerpt(self.algorithm)} is unknown; legal: {legal}")
        for op in self.ops:
            if op not in SERVED:
                raise TopologyError(f"library row {self.name}: op {excerpt(op)} is unknown; legal: {', '.join(SERVED)}")

    def share(self, far: bool) -> float:
        """Return the share of a far, or a near, rate that it reaches."""
        return self.far_share if far else self.near_share

    @property
    def name(self) -> str:
        """The algorithm and the protocol."""
        return f"{self.algorithm} {self.protocol}".rstrip()


@dataclass(frozen=True, slots=True)
class Library:
    """A table of rows. Raises `TopologyError` for a row of an unknown algorithm, and numbers out of their range."""

    name: str
    rows: tuple[LibraryRow, ...]
    measured: str = ""  # on what the numbers were fitted; empty where nobody measured this library
    own_copy: float = 0.0  # of the seconds of a member's own part on a near link, what copying it takes
    member_order: bool = False  # whether rings follow the order of members, even inside a node
    even_only: bool = False  # whether all else than equal parts, and reductions of all libraries, runs as messages

    @property
    def caveat(self) -> str:
        """That nobody measured it, to print beside its seconds; empty where somebody did."""
        return "" if self.measured else f"{self.name}: nobody measured it"

    def best_share(self, far: bool) -> float:
        """Return the largest share of a rate that any row reaches."""
        return max(row.share(far) for row in self.rows)

    def algorithms(self) -> tuple[str, ...]:
        """Return the names that may be asked for: algorithms, then rows where an algorithm has several."""
        algorithms = tuple(dict.fromkeys(row.algorithm for row in self.rows))
        return tuple(dict.fromkeys((*algorithms, *(row.name for row in self.rows))))

    def serving(self, op: str, asked: str = "auto") -> tuple[LibraryRow, ...]:
        """Return the rows that serve an op, of the algorithm (or row) asked for where any of it does."""
        rows = tuple(row for row in self.rows if op in row.ops)
        named = tuple(row for row in rows if asked in (row.algorithm, row.name))
        return named or tuple(row for row in rows if not row.asked)


@lru_cache(maxsize=32)
def without_reductions(table: Library) -> Library:
    """Return a library without the rows that only reduce, by which nothing goes where there are no addends."""
    rows = tuple(row for row in table.rows if not set(row.ops) <= set(REDUCING))
    return replace(table, rows=rows or table.rows)


@lru_cache(maxsize=32)
def only_messages(table: Library) -> Library:
    """Return a library with the rows that carry messages alone, by which all goes where nothing is replicated."""
    return replace(table, rows=tuple(row for row in table.rows if {"messages", "all_to_all"} & set(row.ops)))


@cache
def libraries() -> tuple[str, ...]:
    """Return the names of the library models that ship with shardplan, sorted."""
    return tuple(sorted(path.stem for path in _TABLES.glob("*.toml")))


@lru_cache(maxsize=32)
def library(name: str) -> Library:
    """Return a library model, by its name or by the path of a table; raises `TopologyError` or `ParseError`.

    >>> library("ring").rows[0].algorithm
    'ring'
    """
    if not name.endswith(".toml") and name not in libraries():
        raise TopologyError(
            f"library {excerpt(name)} is unknown; legal: {', '.join(libraries())}, or a path to a .toml"
        )
    path = Path(name) if name.endswith(".toml") else _TABLES / f"{name}.toml"
    try:
        return parse_library(path.read_text(encoding="utf-8"), str(name))
    except OSError as error:
        raise TopologyError(f"library table {str(name)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ParseError(f"library table {str(name)!r} is not UTF-8 text") from error


def parse_library(text: str, what: str = "library table") -> Library:
    r"""Read the text of a table; raises `ParseError` where it is malformed, `TopologyError` where a value is wrong.

    >>> text = 'name = "x"\n[[rows]]\nalgorithm = "ring"\nops = ["all_gather"]\nbase = "2 us"\n'
    >>> parse_library(text).rows[0].base
    2e-06
    """
    try:
        data = decode_toml(text)
    except ParseError as error:
        raise ParseError(f"{what} is no TOML: {error}") from error
    check_keys(what, data, ("name", "measured", "own_copy", "member_order", "even_only", "rows"))
    rows = data.get("rows")
    if not isinstance(rows, list) or not rows:
        raise TopologyError(f"{what}: at least one [[rows]] table is needed")
    return Library(
        validation.text(f"{what}: name", data.get("name", ""), TopologyError),
        tuple(_row(f"{what}: rows[{n}]", row) for n, row in enumerate(rows)),
        validation.text(f"{what}: measured", data.get("measured", ""), TopologyError),
        _number(f"{what}: own_copy", data.get("own_copy", 0.0), 0, 2),
        validation.flag(f"{what}: member_order", data.get("member_order", False), TopologyError),
        validation.flag(f"{what}: even_only", data.get("even_only", False), TopologyError),
    )


def _row(what: str, data: Any) -> LibraryRow:
    if not isinstance(data, dict):
        raise TopologyError(f"{what} is {excerpt(data)}; legal is a table")
    check_keys(what, data, ("algorithm", "protocol", "ops", *_LENGTHS, *_NUMBERS, "members", "asked"))
    numbers: dict[str, float | None] = {"base": None, "base_far": None}
    if not {"base", "base_far"} & set(data):
        raise TopologyError(f"{what}: neither base nor base_far is given; legal are '0 us' and more for what it serves")
    for key in _LENGTHS:
        if key in data:
            if not isinstance(data[key], str):
                raise TopologyError(
                    f"{what}: {key} is {excerpt(data[key])}; legal is a string with a unit, like '2 us'"
                )
            numbers[key] = parse_quantity(f"{what}: {key}", data[key], parse_seconds)
    for key in _NUMBERS:
        if key in data:
            numbers[key] = _number(f"{what}: {key}", data[key], *((1e-9, 2) if key.endswith("share") else (0, 1e3)))
    ops = validation.items(f"{what}: ops", data.get("ops"), "names of collectives", TopologyError)
    return LibraryRow(
        validation.text(f"{what}: algorithm", data.get("algorithm"), TopologyError),
        validation.text(f"{what}: protocol", data.get("protocol", ""), TopologyError),
        tuple(validation.text(f"{what}: an op", op, TopologyError) for op in ops),
        **numbers,  # pyright: ignore[reportArgumentType]
        members=validation.integer(f"{what}: members", data.get("members", 2), TopologyError),
        asked=validation.flag(f"{what}: asked", data.get("asked", False), TopologyError),
    )


def _number(what: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise TopologyError(f"{what} is {excerpt(value)}; legal is a number of at least {least:g} and at most {most:g}")
    return float(value)


def library_text(table: Library) -> str:
    """Print a table as a file that `parse_library` reads back."""
    lines = [f"name = {basic_string(table.name)}", f"measured = {basic_string(table.measured)}"]
    lines.append(f"own_copy = {table.own_copy!r}")
    if table.member_order:
        lines.append("member_order = true")
    if table.even_only:
        lines.append("even_only = true")
    for row in table.rows:
        names = f'algorithm = "{row.algorithm}"', f"protocol = {basic_string(row.protocol)}"
        lines += ["", "[[rows]]", *names, f"ops = [{', '.join(map(basic_string, row.ops))}]"]
        values = [(key, getattr(row, key)) for key in _LENGTHS]
        lines += [f'{key} = "{exact(value, "s")}"' for key, value in values if value is not None]
        lines += [f"{key} = {getattr(row, key)!r}" for key in _NUMBERS]
        lines.append(f"members = {row.members}")
        if row.asked:
            lines.append("asked = true")
    return "\n".join(lines) + "\n"
