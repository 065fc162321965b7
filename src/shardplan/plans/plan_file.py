"""Plan files (JSON) and the annotated print-out of a plan."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from shardplan.core.accounting import MANY_CHUNKS, account
from shardplan.core.mesh import Mesh
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.core.walk import program_leaves
from shardplan.errors import ParseError, ShardplanError, line
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.plans.certificate import TYPES, Certificate
from shardplan.plans.plan_fields import FORMAT, PlanFields, read_fields
from shardplan.plans.pricing import NOISE, fabric_of, network_name, step_prices


def plan_dict(certificate: Certificate) -> dict[str, Any]:
    """Return a plan as one JSON object: a program and what is claimed of it."""
    return {
        "format": FORMAT,
        "program": str(certificate.program),
        "certificate": certificate.to_dict(),
        "seconds": certificate.seconds,
    }


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or all of the new: partial file, fsync, rename."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def save_plan(certificate: Certificate, path: Path) -> None:
    """Write a plan file, atomically; raises `ShardplanError` where that cannot be."""
    try:
        write_atomic(path, msgspec.json.format(msgspec.json.encode(plan_dict(certificate)), indent=1))
    except OSError as error:
        raise ShardplanError(f"cannot write the plan file {line(path)}: {error.strerror}") from None


def _type(text: str, program: Program) -> TensorType:
    kind, _, mesh = text.partition(" on ")
    return TensorType.parse(kind, Mesh.parse(mesh), program.tables)


def load_plan(path: Path) -> Certificate:
    """Return what a plan file claims, unchecked; raises `ParseError` naming the file and what is wrong with it."""
    try:
        return _certificate(read_fields(path.read_bytes()))
    except OSError as error:
        raise ParseError(f"cannot read the plan file {line(path)}: {error.strerror}") from None
    except ShardplanError as error:
        raise ParseError(f"{line(path)} is not a plan file: {first_line(error)}") from None


def _certificate(fields: PlanFields) -> Certificate:
    """The certificate that a file's fields say; an error names the field."""
    claims = msgspec.structs.asdict(fields.certificate)
    with _naming_field("program"):
        program = Program.parse(fields.program)
    for name in TYPES:
        with _naming_field(f"certificate.{name}"):
            claims[name] = tuple(_type(text, program) for text in claims[name])
    for kind, text in (fields.certificate.where or {}).items():
        with _naming_field(f"certificate.where.{kind}"):
            claims["where"] = Placement.parse(text) if kind == "placement" else Topology.parse(text)
    return Certificate(program=program, **claims)


@contextmanager
def _naming_field(field: str) -> Generator[None]:
    """Raise what is wrong in the text of a field as a `ParseError` that names it."""
    try:
        yield
    except ShardplanError as error:
        raise ParseError(f"{field}: {first_line(error)}") from None


def first_line(error: ShardplanError) -> str:
    """Return an error's message without the lines that point into a text."""
    return str(error).partition("\n")[0]


def remarks(c: Certificate) -> list[str]:
    """Return a line for each thing that a plan could not avoid: a peak above its bound, more chunks than are good."""
    lines: list[str] = []
    if c.memory_limit is None and c.peak_bytes > c.bound_bytes:
        lines.append(
            f"order      peak {format_bytes(c.peak_bytes - c.bound_bytes)} above the bound: no order found of these "
            "moves keeps it, and this is the least peak found"
        )
    chunks = max((leaf.op.chunks for leaf in program_leaves(c.program)), default=1)
    if chunks > MANY_CHUNKS:
        lines.append(f"chunks     {chunks} in the largest step, more than {MANY_CHUNKS}: each pays its latency again")
    return lines


def annotate_steps(c: Certificate) -> str:
    """Return a program's text with the most bytes that a device sends or receives in every step, and its seconds."""
    books, fabric = account(c.program), fabric_of(c.where, c.program.meshes)
    prices = step_prices(c.program, fabric, c.algorithm)
    # Of the nominal switch no library is chosen, and none of its algorithms.
    chosen = [x for x in fabric.library.algorithms() if not x.startswith("p2p")] if c.where is not None else []
    caveat = fabric.library.caveat if c.where is not None else ""
    costs = [
        format_seconds(p.seconds) + (f", {p.algorithm}" if step.op.algorithm or p.algorithm in chosen else "")
        for step, p in zip(c.program.steps, prices, strict=True)
    ]

    def note(number: int, step: Step) -> str:
        return f"{format_bytes(books.step_moved[number])}, {costs[number]}"

    over = f" ({c.seconds / c.lower_bound_seconds:.2f}x)" if c.where is not None and c.lower_bound_seconds > 0 else ""
    sent, received = max(c.sent_bytes, default=0), max(c.received_bytes, default=0)
    least = max(c.lower_bound_bytes, default=0)
    ratio = f" ({c.gap:.3f}x)" if least else ""
    lines = [
        c.program.text(note, format_bytes),
        f"received   {format_bytes(received)} at the worst device; lower bound {format_bytes(least)}{ratio}"
        + (f"; {format_bytes(sent)} sent" if sent > received else "")
        + f"; {c.status}",
        f"memory     peak {format_bytes(c.peak_bytes)}, bound {format_bytes(c.bound_bytes)}; workspace "
        f"{format_bytes(c.workspace_bytes)}"
        + (f" with {len(c.kept_inputs)} kept" if c.kept_inputs else "")
        + (f", limit {format_bytes(c.memory_limit)}" if c.memory_limit is not None else ""),
        f"predicted  {format_seconds(c.seconds)} on {network_name(c.where)}; lower bound "
        f"{format_seconds(c.lower_bound_seconds)}{over}",
    ]
    if c.least_seconds is not None:
        lines.append(
            f"least      {format_seconds(c.least_seconds)} by another program: within {NOISE:.0%} what counts is bytes "
            "on the slowest level, then devices in a step, collectives by name, and steps"
        )
    lines += [f"library    {caveat}"] if caveat else []
    if any(padding := c.padding):
        lines.append(
            f"padding    {format_bytes(padding.received)} of those received; slots of {format_bytes(padding.staged)} "
            f"staged, {format_bytes(padding.behind)} behind a result as long as it lives"
        )
    lines += remarks(c)
    if c.level_bytes:
        topology = c.where.topology if isinstance(c.where, Placement) else c.where
        names = [level.name for level in topology.levels] if topology else []
        crossing = ", ".join(f"{n} {format_bytes(b)}" for n, b in zip(names, c.level_bytes, strict=True))
        lines.append(f"levels     {crossing}")
    if isinstance(c.where, Placement):
        lines.append(f"placement  {c.where.describe()}")
    return "\n".join(lines)
