"""The print-outs and JSON objects of the commands: keys are the attribute names, types and programs are text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.execution.verify import TrialVerdict
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.library import library
from shardplan.hardware.topology import Topology
from shardplan.plans.plan import Plan
from shardplan.report.contents import Frame, frames, shape_text
from shardplan.report.picture import text_picture


def json_text(found: Mapping[str, Any]) -> str:
    """Return one JSON object on one line."""
    return msgspec.json.encode(found).decode()


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return rows as lines, headings first; the columns in `left` to the left, others to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(
            c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def clip_text(text: str, most: int) -> str:
    """Return a text of at most so many characters, whose end says that it goes on."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def plan_object(plan: Plan) -> dict[str, Any]:
    """Return a plan as an object: program, certificate, seconds, and on a topology the library whose they are."""
    c = plan.certificate
    topology = c.where.topology if isinstance(c.where, Placement) else c.where
    own = {} if topology is None else {"library": library_object(topology)}
    return {"program": str(plan.program), "certificate": c.to_dict(), "seconds": plan.seconds} | own


def library_object(topology: Topology) -> dict[str, Any]:
    """Return the library of a topology as an object: its name, and on what it was measured, null where nobody did."""
    found = library(topology.library)
    return {"name": found.name, "measured": found.measured or None}


def type_object(t: TensorType) -> dict[str, Any]:
    """Return a type as an object: type, mesh, the largest local shape, and the box of every device."""
    return {
        "type": str(t),
        "mesh": str(t.mesh),
        "local_shape": list(t.local_shape(0)),
        "local_bytes": t.local_bytes(),
        "devices": _devices(frames(t, t.mesh.size)[0]),
    }


def program_object(program: Program) -> dict[str, Any]:
    """Return a program as an object: its text, the types after each step, and what each device holds (`frames`)."""
    drawn = frames(program)
    return {
        "program": str(program),
        "types": [f"{program.types[r]} on {program.types[r].mesh}" for s in program.steps for r in s.results],
        "frames": [
            {
                "title": f.title,
                "op": f.op,
                "value": f.value,
                "type": f"{f.type} on {f.type.mesh}",
                "devices": _devices(f),
            }
            for f in drawn
        ],
    }


def _devices(frame: Frame) -> list[dict[str, Any]]:
    return [{"device": h.device, "box": h.box, "kept": h.kept} for h in frame.held]


def shown(subject: Plan | Program | TensorType) -> str:
    """Return the print-out of a plan, program or type, with the picture of what each device holds."""
    if isinstance(subject, TensorType):
        local = f"{shape_text(subject.local_shape(0))} on a device, {subject.local_bytes()} bytes; mesh {subject.mesh}"
        return f"{text_picture(subject)}\n\n{local}"
    program = subject.program if isinstance(subject, Plan) else subject
    return f"{subject}\n\n{text_picture(program)}".rstrip()


def check_object(path: Path, plan: Plan, verdict: TrialVerdict) -> dict[str, Any]:
    """Return what `check` found as an object."""
    return {
        "ok": verdict.complete or None,
        "plan": str(path),
        "status": plan.certificate.status,
        "runs": list(verdict.runs),
        "shards": verdict.shards,
        "elements": verdict.elements,
        "total_elements": verdict.total,
        "blocks": verdict.blocks,
        "skipped": None if verdict.complete else _left_out(verdict),
        "certificate": plan.certificate.to_dict(),
    }


def check_text(plan: Plan, verdict: TrialVerdict) -> str:
    """Return what `check` found."""
    c = plan.certificate
    lines = [f"certificate  every claim follows from the program; status {c.status}"]
    if verdict.complete:
        lines.append(
            f"execution    {verdict.shards} shards ({verdict.elements} elements) equal the destination's, "
            f"on {' and on '.join(f'{r} data' for r in verdict.runs)}"
            + (f", in {verdict.blocks} blocks" if verdict.blocks > 1 else "")
        )
        return "\n".join([*lines, "ok"])
    lines.append(
        f"execution    {verdict.elements} elements of {verdict.shards} shards equal the destination's, on index data"
    )
    return "\n".join([*lines, f"not run      {_left_out(verdict)}", "ok in what was run"])


def _left_out(verdict: TrialVerdict) -> str:
    return (
        f"{verdict.total - verdict.elements} of {verdict.total} elements: along each dim those between the first and "
        "the last index of every run that no step cuts"
    )


def run_object(program: Program, backend: str, sums: Sequence[str], ok: bool | None) -> dict[str, Any]:
    """Return what `run` found: `ok` is null where there is nothing to compare with."""
    types = program.output_types
    return {
        "ok": ok,
        "backend": backend,
        "outputs": [
            {"name": name, "type": f"{t} on {t.mesh}", "checksum": found}
            for name, t, found in zip(program.outputs, types, sums, strict=True)
        ],
    }


def run_text(found: Mapping[str, Any]) -> str:
    """Return what `run` found as text."""
    rows = [(f"%{o['name']}", o["checksum"], o["type"]) for o in found["outputs"]]
    width = max((len(r[0]) for r in rows), default=0)
    end = {
        True: "ok: every output that was only moved equals its input",
        None: "ok: all replicas agree",
        False: "the outputs differ",
    }
    return "\n".join([*(f"{n:<{width}}  {c}  {t}" for n, c, t in rows), end[found["ok"]]])
