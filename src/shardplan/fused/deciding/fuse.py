"""`fuse`: the pass over a program, or over the programs of a job, which fuses where it is predicted to pay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from shardplan.core.accounting import books_of
from shardplan.core.fusing import FusionPlace, Place, fusable, fused_with
from shardplan.core.nested import as_nested
from shardplan.core.ops.fused import Fused
from shardplan.core.ops.fused_forms import GemmForm
from shardplan.core.pattern import Overlap
from shardplan.core.program import Program
from shardplan.core.text import op_text
from shardplan.errors import ShardplanError, TopologyError, excerpt, line
from shardplan.fused.deciding.rows import Fusion, FusionRow, seconds_of
from shardplan.fused.tiles.schedule import SLOTS
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import price_overlap
from shardplan.hardware.prices.fused import UNFUSED, FusedConstants, FusedVariant, decide
from shardplan.plans.pricing import Where, fabric_of, where_of
from shardplan.strategy.partition.job import Job

FAR_BACKENDS = ("net",)  # whose constants are of a transport between nodes
Runs = TypeVar("Runs", Program, Job)
Chosen = dict[Place, tuple[FusionPlace, Fused]]


def fuse(program: Runs, placement: Where | str, calibration: FusedConstants | str | Path | None = None) -> Fusion[Runs]:
    """Return a program, or a job, in which computations and the collectives beside them are one where that pays.

    Fused is what is predicted at least 5 % faster, in the number of tiles that is fastest; the rest stays as it is, and
    its row says why. Types and meaning are the same. A job's rows are those of each program once.

    Args:
        program: A program, with its repeats, or a `Job`.
        placement: Where it runs: a placement, or a topology (or its text) whose ids are the device ids.
        calibration: The constants of the transport and of the kernels, or the path of their file; without, the
            topology's figures, in which a signal takes the latency of the level that it crosses.

    Raises:
        TopologyError: Constants that are none.
        ShardplanError: Another kind of value.

    Source: arXiv 2305.06942 for the ops; the price is that of `hardware.prices.fused`.

    >>> p = Program.parse('''program
    ...   mesh x=4
    ...   input %a: bf16[4@x, 4096, 4096]
    ...   input %b: bf16[4@x, 4096, 4096]
    ...   %z = einsum(%a, %b; spec="wmk,wkn->wmn"): bf16[4@x, 4096, 4096]
    ...   %y = all_to_all(%z; src_dim=0, dst_dim=1, axes=(x)): bf16[4, 4096@x, 4096]
    ...   output %y''')
    >>> found = fuse(p, "dgx-a100")
    >>> [(row.place, row.choice, row.reason) for row in found.rows], len(found.program.steps)
    ([('1', 'fused n=1', 'fused')], 1)
    """
    where = where_of("the placement", placement)
    if where is None:
        raise ShardplanError("the placement is None; legal are a placement, a topology, and a topology's text")
    measured = constants_of(calibration)
    if isinstance(program, Job):
        return cast("Fusion[Runs]", _job(program, where, measured))
    if not isinstance(program, Program):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardplanError(f"fuse of {excerpt(program)}; legal is a Program, such as plan.program, or a Job")
    found, rows = _program(program, where, measured, "")
    return cast("Fusion[Runs]", Fusion(found, rows, _source(where, measured)))


def constants_of(calibration: object) -> FusedConstants | None:
    """Return constants, given as such or as the path of their file, or None; raises `TopologyError`."""
    if calibration is None or isinstance(calibration, FusedConstants):
        return calibration
    if isinstance(calibration, str | Path):
        return FusedConstants.load(calibration)
    raise TopologyError(f"calibration is {excerpt(calibration)}; legal are FusedConstants, the path of a file, or None")


def _source(where: Where, measured: FusedConstants | None) -> str:
    if measured is not None:
        return measured.source or measured.backend
    topology = where.topology if isinstance(where, Placement) else where
    return f"the topology's figures ({topology.name or 'unnamed'}), not calibrated"


def _job(job: Job, where: Where, measured: FusedConstants | None) -> Fusion[Job]:
    """Fuse every program that stages share once, as it is on the first stage that has it."""
    shared = list(job.programs.shared)
    rows: list[FusionRow] = []
    for number, program in enumerate(shared):
        stage, kind = next(key for key, which in job.programs.which.items() if which == number)
        shared[number], more = _program(program, where, measured, f"{stage}{kind} ")
        rows += more
    programs = replace(job.programs, shared=tuple(shared), laid={})
    return Fusion(replace(job, programs=programs), tuple(rows), _source(where, measured))


def _program(
    program: Program, where: Where, measured: FusedConstants | None, before: str
) -> tuple[Program, tuple[FusionRow, ...]]:
    held = max(books_of(program).step_workspaces, default=0)
    candidates = list(fusable(program))
    tried = [_row(_enclosing_program(program, one.place), one, where, measured, held) for one in candidates]
    rows = [replace(row, place=before + row.place) for row, _ in tried]
    chosen: Chosen = {}
    taken: dict[Place, str] = {}
    for k in sorted(range(len(rows)), key=lambda k: -rows[k].saved_seconds):
        one, op = candidates[k], tried[k][1]
        steps = [(*one.place[:-1], number) for number in one.steps]
        if op is None:
            continue
        if other := next((taken[step] for step in steps if step in taken), ""):
            text = f"its product is that of the pair at {other}, which saves more"
            rows[k] = replace(rows[k], reason="taken", choice=str(UNFUSED), blocked=f"step {other}", text=text)
            continue
        taken |= dict.fromkeys(steps, rows[k].place)
        chosen[one.place] = one, op
    return (fused_with(program, chosen) if chosen else program), tuple(rows)


def _enclosing_program(program: Program, place: Place) -> Program:
    """The program, or the body, that the last number of a place is a step of."""
    for number in place[:-1]:
        op = as_nested(program.steps[number].op)
        assert op is not None  # places are those of `fusable`
        program = op.body
    return program


def _row(
    program: Program, one: FusionPlace, where: Where, measured: FusedConstants | None, held: int
) -> tuple[FusionRow, Fused | None]:
    """Return the row of a candidate, and what it becomes, None where it stays."""
    move = program.steps[one.move]
    operands, results = program.step_types(move)
    given = one.operands or tuple(_outer_operands(program, one))
    made = program.steps[one.steps[-1]].results
    row = FusionRow(
        ".".join(map(str, one.place)),
        one.kind.name,
        tuple(str(program.types[name]) for name in (*given, *made)),
        int(move.op.sent_bytes(*operands)[1].max(initial=0)),
        {},
        str(UNFUSED),
        one.reason,
        source=_source(where, measured),
    )

    def blocked(number: int, reason: str, text: str) -> FusionRow:
        step = program.steps[number]
        said = f"step {number} ({op_text(step.op, step.operands)})"
        return replace(row, reason=reason, blocked=said, text=text)

    if one.op is None:
        return blocked(one.blocked, one.reason, one.text), None
    try:
        fabric = fabric_of(where, [results[0].mesh])
    except TopologyError as error:
        return blocked(one.move, "unknown_group", line(str(error))), None
    pattern = one.op.pattern(*(program.types[name] for name in one.operands))
    assert isinstance(pattern, Overlap)
    work, constants, moved = price_overlap(pattern, fabric, measured=measured)
    if work is None or constants is None:
        return blocked(one.move, "not_faster", "its groups have one device; nothing is sent"), None
    decision = decide(work, constants)
    row = replace(row, seconds=seconds_of(decision), text=_experts(one.op))
    far = [wire.level.name for wire, n in zip(fabric.wires[: fabric.far], moved.level_bytes, strict=False) if n > 0]
    if far and (measured is None or measured.backend not in FAR_BACKENDS):
        text = f"its groups cross the level {far[0]}, over which no device writes another's memory"
        return blocked(one.move, "no_peer_access", text), None
    need, memory = SLOTS * one.op.landing_bytes, fabric.topology.device.memory
    if held + need > memory:
        text = f"{need} B for {SLOTS} slots beside {held} B of the program; the device has {memory:.0f} B"
        return blocked(one.move, "memory", text), None
    best = decision.best_variant
    if best == UNFUSED:
        return replace(row, reason="not_faster"), None
    return replace(row, reason="fused", choice=str(best)), apply_variant(one.op, best)


def _experts(op: Fused) -> str:
    """Why products of several experts a device are as many calls of one operator."""
    form = op.form
    if not isinstance(form, GemmForm) or not (form.batch and form.cut and form.gathered):
        return ""
    letters = dict(zip(form.sides[0], op.body.input_types[form.a].local_shape(0), strict=True))
    each = math.prod(letters[c] for c in form.batch)
    return f"{each} products of as many rows each, a call each; grouped_gemm_all_to_all is of uneven ones" * (each > 1)


def apply_variant(op: Fused, way: FusedVariant) -> Fused:
    """Return a fused op in the tiles, and shots, of a way."""
    shots = {"shots": 1} if way.kind == "one_shot" else {}
    return replace(op, tiles=way.tiles, **shots)


def _outer_operands(program: Program, one: FusionPlace) -> Iterator[str]:
    """What the steps of a candidate read from outside, each once."""
    made = {r for k in one.steps for r in program.steps[k].results}
    yield from dict.fromkeys(o for k in one.steps for o in program.steps[k].operands if o not in made)
