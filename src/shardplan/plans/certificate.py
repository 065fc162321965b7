"""`Certificate`: what is proved of a plan, and re-checked without the planner that made it.

Types, peaks and bytes are derived from the program by `core` alone; levels, seconds and their bound by `hardware` and
the rest of this room. `status` is `floor` (seconds without latencies are within 0.1 % of their lower bound, which
counts senders, receivers and, with a topology, cuts), `exact` (nothing cheaper in the planner's graph of types: which,
like `least_seconds`, a check cannot prove) or `heuristic`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.accounting import Account, Padding, account, bound_bytes, lower_bound, padding_of
from shardplan.core.mesh import Mesh
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import CertificateError, ShardplanError, excerpt
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.library import library
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.notebook import notebook_html
from shardplan.plans.nominal import nominal_bound
from shardplan.plans.pricing import Where, fabric_of, price_program, seconds_bound

STATUSES = ("floor", "exact", "heuristic")
FLOOR = 1.001  # seconds over their lower bound, both without latencies, up to which a plan is at the floor
# Seconds and bytes of levels are sums of floats, which another numpy may add up in another order: they are compared to
# nine digits, and below a femtosecond not at all. Whole numbers are compared exactly.
RELATIVE, ABSOLUTE = 1e-9, 1e-15
LONGEST = 120  # characters of a claim in a message


@dataclass(frozen=True, slots=True)
class Certificate:
    """The claims of a plan; `check()` re-derives every one of them from `program`.

    Bytes are per device, by ascending id over all meshes. `peak_bytes` is the largest live shard (of a batch: sum of
    live shards) between steps, `bound_bytes` the larger of source and destination, `workspace_bytes` input + output +
    staging of the worst step. Without a limit the peak of one tensor keeps the bound; that of a batch of which no order
    was found that keeps it is above it. Outputs behind the destinations are inputs that the caller keeps.
    `level_bytes` sums over devices, outermost level first, () without a topology. Steps are priced under `algorithm`:
    `auto`, the cheapest row of the library for each, or an algorithm of it. `least_seconds` are those of the cheapest
    program that the planner found, where it took this one for fewer bytes on the slowest level or less trouble.
    """

    program: Program
    sources: tuple[TensorType, ...]
    destinations: tuple[TensorType, ...]
    where: Where | None
    memory_limit: int | None
    status: str
    types: tuple[TensorType, ...]
    peak_bytes: int
    bound_bytes: int
    workspace_bytes: int
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    lower_bound_bytes: tuple[int, ...]
    total_lower_bound_bytes: int
    rounds: int
    level_bytes: tuple[float, ...]
    seconds: float
    lower_bound_seconds: float
    algorithm: str = "auto"
    least_seconds: float | None = None

    _repr_html_ = notebook_html

    @property
    def summary(self) -> str:
        """A line: what is moved, in how many steps, the bytes that the worst device receives, the seconds."""
        many = len(self.sources)
        ends = f"{self.sources[0]} to {self.destinations[0]}" if many == 1 else f"of {many} tensors"
        steps = len(self.program.steps)
        received = format_bytes(max(self.received_bytes, default=0))
        return f"{ends}: {steps} step{'s' * (steps != 1)}, {received} received, {format_seconds(self.seconds)}"

    def __repr__(self) -> str:
        """Return that line, and whether a bound is met."""
        return f"<Certificate {self.summary}, {self.status}>"

    @property
    def gap(self) -> float:
        """Bytes at the worst device over the lower bound there; 1 when both are 0, infinite when only the bound is."""
        got, least = max(self.received_bytes, default=0), max(self.lower_bound_bytes, default=0)
        return got / least if least else math.inf if got else 1.0

    @property
    def padding(self) -> Padding:
        """What padded collectives cost in bytes received, staged, and behind results, on the worst device."""
        return padding_of(self.program)

    @property
    def kept_inputs(self) -> tuple[str, ...]:
        """The inputs that the caller keeps: outputs behind those of the destinations."""
        return self.program.outputs[len(self.destinations) :]

    def check(self) -> None:
        """Re-derive every claim from the program; raises `CertificateError` naming the first that does not follow."""
        self._check_kinds()
        try:
            found = derive(self.program, self.sources, self.destinations, self.where, algorithm=self.algorithm)
        except CertificateError:
            raise
        except ShardplanError as error:
            raise CertificateError(f"the program does not type or cannot be priced: {error}") from None
        for name, value in found.claims.items():
            claimed = getattr(self, name)
            if not _equal(claimed, value):
                raise CertificateError(
                    f"{name} is claimed to be {_short_text(claimed)}, but follows to be {_short_text(value)}"
                )
        if self.memory_limit is None:
            if self.peak_bytes > self.bound_bytes and len(self.sources) == 1:
                raise CertificateError(f"peak_bytes {self.peak_bytes} exceeds bound_bytes {self.bound_bytes}")
        elif self.workspace_bytes > self.memory_limit:
            raise CertificateError(f"workspace_bytes {self.workspace_bytes} exceeds the limit {self.memory_limit}")
        least = self.least_seconds
        legal = isinstance(least, float) and self.lower_bound_seconds * (1 - RELATIVE) <= least <= self.seconds
        if least is not None and not legal:
            raise CertificateError(
                f"least_seconds is claimed to be {_short_text(least)}, which is not between the lower bound "
                f"{_short_text(self.lower_bound_seconds)} and the seconds {_short_text(self.seconds)}"
            )
        if self.status == "floor" and not found.floor:
            raise CertificateError(
                "status floor is claimed, but without latencies the seconds are more than 0.1 % above their lower bound"
            )

    def _check_kinds(self) -> None:
        """Refuse what no claim follows from: fields of another kind, and names that are unknown."""
        for name in TYPES:
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(t, TensorType) for t in value):  # pyright: ignore[reportUnknownVariableType]
                raise CertificateError(f"{name} is {excerpt(value)}; legal is a tuple of types")
        if self.where is not None and not isinstance(self.where, Where):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CertificateError(f"where is {excerpt(self.where)}; legal is a Topology, a Placement or None")
        if self.memory_limit is not None and not isinstance(self.memory_limit, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CertificateError(f"memory_limit is {excerpt(self.memory_limit)}; legal is a number of bytes or None")
        topology = self.where.topology if isinstance(self.where, Placement) else self.where
        legal = ("auto",) if topology is None else ("auto", *library(topology.library).algorithms())
        if self.algorithm not in legal:
            raise CertificateError(f"unknown algorithm {excerpt(self.algorithm)}; legal are {', '.join(legal)}")
        if self.status not in STATUSES:
            raise CertificateError(f"unknown status {excerpt(self.status)}; legal are {', '.join(STATUSES)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the claims as plain values: types and programs as text."""
        out: dict[str, Any] = {}
        for name in CLAIMS:
            value = getattr(self, name)
            if name == "program":
                continue
            if name in TYPES:
                out[name] = [f"{t} on {t.mesh}" for t in value]
            elif name == "where":
                kind = "placement" if isinstance(value, Placement) else "topology"
                out[name] = None if value is None else {kind: str(value)}
            else:
                out[name] = list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]
        return out


class DerivedClaims(NamedTuple):
    """What follows from a program."""

    claims: dict[str, Any]
    floor: bool  # seconds without latencies are within 0.1 % of their lower bound


def derive(
    program: Program,
    sources: Sequence[TensorType],
    destinations: Sequence[TensorType],
    where: Where | None,
    books: Account | None = None,
    algorithm: str = "auto",
) -> DerivedClaims:
    """Return every claim that follows from a program; raises `CertificateError` when its ends are not those asked for.

    `books` is the account of a program that was typed and booked a moment ago; without it both are done from scratch.
    """
    if books is None:
        program = Program(program.inputs, program.steps, program.outputs)
        books = account(program)
    if program.input_types != tuple(sources):
        raise CertificateError(f"the program starts from {_texts(program.input_types)}, not from {_texts(sources)}")
    kept = program.outputs[len(destinations) :]
    if len(program.outputs) < len(destinations) or not set(kept) <= {name for name, _ in program.inputs}:
        raise CertificateError(f"the program has {len(program.outputs)} outputs, not {len(destinations)}")
    if len(set(kept)) < len(kept):
        raise CertificateError(f"the program keeps an input twice: {', '.join('%' + name for name in kept)}")
    for found, asked in zip(program.output_types, destinations, strict=False):
        if found != asked:
            meshes = [f" on {t.mesh}" if found.mesh != asked.mesh else "" for t in (found, asked)]
            raise CertificateError(f"the program ends in {found}{meshes[0]}, which is not {asked}{meshes[1]}")
    devices = Mesh.devices_of(t.mesh for t in (*sources, *destinations))
    if not set(books.devices) <= set(devices):
        raise CertificateError("the program uses devices of neither end")
    sent, received = books.sent, books.received
    if books.devices != devices:
        sent, received = np.zeros((2, len(devices)), dtype=np.result_type(books.sent, books.received))
        at = np.searchsorted(devices, books.devices)
        sent[at], received[at] = books.sent, books.received
    bounds = [lower_bound(s, t, devices) for s, t in zip(sources, destinations, strict=True)]
    least = np.sum(bounds, axis=0) if bounds else np.zeros(len(devices), dtype=np.int64)
    total = sum(total_bound(s, t, b) for s, t, b in zip(sources, destinations, bounds, strict=True))
    fabric = fabric_of(where, program.meshes)
    cost = price_program(program, fabric, algorithm)
    if where is None:
        whole = (b for b, t in zip(bounds, destinations, strict=True) if not t.layout.partial)  # see `seconds_bound`
        bound = nominal_bound(sources, destinations, sum(whole, np.zeros(len(devices))), devices)
    else:
        bound = seconds_bound(sources, destinations, fabric, program.meshes)
    claims = {
        "types": tuple(program.types[r] for step in program.steps for r in step.results),
        "peak_bytes": books.peak_bytes,
        "bound_bytes": bound_bytes(sources, destinations),
        "workspace_bytes": books.workspace_bytes,
        "sent_bytes": _bytes_of(sent),
        "received_bytes": _bytes_of(received),
        "lower_bound_bytes": _bytes_of(least),
        "total_lower_bound_bytes": total,
        "rounds": sum(books.rounds),
        "level_bytes": cost.level_bytes if where is not None else (),
        "seconds": cost.seconds,
        "lower_bound_seconds": bound.seconds,
    }
    return DerivedClaims(claims, cost.transfer <= FLOOR * bound.transfer)


def _bytes_of(values: np.ndarray) -> tuple[int, ...]:
    """Return counts as integers, equal ones once: of many devices most are."""
    most = int(values.max(initial=0))
    if bool((values == most).all()):
        return (most,) * len(values)
    some, number = np.unique(values, return_inverse=True)
    return tuple(some.astype(object)[number].tolist())


def total_bound(s: TensorType, t: TensorType, least: np.ndarray) -> int:
    """Return the bytes that all devices together must receive.

    One addend an element: the sum of the devices' bounds. k > 1 addends reduced for R destination devices: k + R - 2
    an element (k - 1 merges before the first complete value, then one delivery for each other destination).
    """
    gone = set(s.mesh.expand(s.layout.partial)) - (set(t.mesh.expand(t.layout.partial)) if s.mesh == t.mesh else set())
    addends = math.prod(s.mesh.atoms[a].size for a in gone)
    if addends == 1 or t.layout.partial:
        return int(least.sum())
    parts = math.prod(t.mesh.span(n).size for d in t.layout.dims for n in d)
    rooted = math.prod(t.mesh.span(n).size for n in t.layout.root)
    return (addends + t.mesh.size // (parts * rooted) - 2) * t.nbytes


def issue(
    program: Program,
    sources: Sequence[TensorType],
    destinations: Sequence[TensorType],
    where: Where | None,
    memory_limit: int | None,
    exact: bool,
    books: Account | None = None,
    algorithm: str = "auto",
    least: float | None = None,
) -> Certificate:
    """Return the certificate of a program; `exact` is the planner's word that nothing cheaper exists.

    So are `least`, the seconds of the cheapest program that it found, where it took another.
    """
    claims, floor = derive(program, sources, destinations, where, books, algorithm)
    status = "floor" if floor else "exact" if exact else "heuristic"
    return Certificate(
        program=program,
        sources=tuple(sources),
        destinations=tuple(destinations),
        where=where,
        memory_limit=memory_limit,
        status=status,
        algorithm=algorithm,
        least_seconds=least,
        **claims,
    )


def _equal(claim: Any, follows: Any) -> bool:
    """Say whether a claim is what follows."""
    if isinstance(follows, float):
        return isinstance(claim, (int, float)) and math.isclose(claim, follows, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    if isinstance(follows, tuple) and follows and isinstance(follows[0], float):
        if not isinstance(claim, tuple) or len(claim) != len(follows):  # pyright: ignore
            return False
        return all(_equal(x, y) for x, y in zip(claim, follows, strict=True))  # pyright: ignore
    return bool(claim == follows)


def _short_text(value: Any) -> str:
    text = _texts(value) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownArgumentType]
    return text if len(text) < LONGEST else text[: LONGEST - 3] + "..."


def _texts(types: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, types)) + ")"


CLAIMS = tuple(f.name for f in fields(Certificate))
TYPES = ("sources", "destinations", "types")  # the claims that are types
