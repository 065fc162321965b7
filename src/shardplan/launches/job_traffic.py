"""`job_traffic`: what a step of a job communicates, by axes and op, as `place` and `audit` take it.

Read are the programs of the rank of a pipeline that receives most: every collective as often as the schedule runs it,
those that are posted together as one call, those of one op, axes and time in a row of as many calls of their mean size.
Axes are a strategy's, with the pipeline outermost; a part of an axis counts as the whole axis with as many bytes
received, an exchange as an all-to-all.

Gradients run behind the backward pass: those that are summed as layers go, behind all that is computed meanwhile; those
that are summed before the update, behind the backward pass of one microbatch (Megatron-LM `--overlap-grad-reduce`,
PyTorch's DDP). Parameters that are gathered a layer ahead run behind their pass, too (FSDP2). What runs at once shares
what is computed by its bytes. Activations are waited for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardplan.core.mesh import Mesh
from shardplan.core.nested import as_nested
from shardplan.core.op import Op
from shardplan.core.pattern import Groups, Work, communicates
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.walk import LeafOp, leaves, program_leaves
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.movement.placing.traffic import OPS, Demand
from shardplan.strategy.partition.job import Job
from shardplan.strategy.strategy import BATCH, SEQUENCE

PIPELINE = "pipeline"
UPDATE = "OPT"  # the kind of action that updates
SUMMING = ("OPT", "NORM")  # kinds of action that sum gradients of all microbatches


@dataclass(frozen=True, slots=True)
class JobTraffic:
    """A job's mesh, row-major over the devices, and its traffic; `rank` is the pipeline's rank that it is of."""

    mesh: Mesh
    demands: tuple[Demand, ...]
    rank: int


class _Row(NamedTuple):
    """Collectives of one op over the same axes, behind the same compute."""

    axes: tuple[str, ...]
    op: str
    behind: str  # the kind of action that computes meanwhile; empty where nothing does


def job_traffic(job: Job, topology: Topology) -> JobTraffic:
    """Return what a step of a job communicates; the topology's devices say what computing takes.

    >>> import shardplan as sp
    >>> model = sp.Model.load("gpt", layers=4, hidden=64, heads=4, seq=32, vocab=96)
    >>> job = sp.partition(model, sp.Strategy(data=2, tensor=2, pipeline=2, global_batch=8))
    >>> found = job_traffic(job, sp.Topology.load("dgx-h100", nodes=1))
    >>> print(found.mesh, found.demands[0], found.demands[2], sep="; ")
    pipeline=2, data=2, tensor=2; all_reduce over tensor: 8.19 kB x 36; permute over pipeline: 9.01 kB x 5
    """
    sizes = {PIPELINE: job.strategy.pipeline} | job.strategy.axes(job.model)
    mesh = Mesh({axis: n for axis, n in sizes.items() if n > 1} or {"data": 1})
    fabric = Fabric(topology)
    ranks = [_rank_rows(job, rank, mesh) for rank in range(job.strategy.pipeline)]
    received = [
        sum(_received_share(row.op, _size(mesh, row.axes)) * n for row, (n, _) in rows.items()) for rows in ranks
    ]
    rank = received.index(max(received))
    rows = ranks[rank]
    hidden = {
        row: total * _received_share(row.op, _size(mesh, row.axes)) for row, (total, _) in rows.items() if row.behind
    }
    shared: dict[str, float] = {}
    for row, total in hidden.items():
        shared[row.behind] = shared.get(row.behind, 0.0) + total
    computed = {kind: _compute_seconds(job, rank, kind, fabric) for kind in shared}
    demands = [
        Demand(row.axes, row.op, total / count, count,
               hidden_seconds=computed[row.behind] * hidden[row] / shared[row.behind] if row.behind else 0.0)
        for row, (total, count) in rows.items()
    ]  # fmt: skip
    return JobTraffic(mesh, tuple(demands), rank)


def with_axes(found: JobTraffic, mesh: Mesh) -> JobTraffic:
    """Return the traffic on a mesh of the same axes in another order, or on other devices."""
    order = {axis: k for k, axis in enumerate(mesh.axes)}
    demands = (replace(d, axes=tuple(sorted(d.axes, key=order.__getitem__))) for d in found.demands)
    return JobTraffic(mesh, tuple(demands), found.rank)


def _rank_rows(job: Job, rank: int, mesh: Mesh) -> Mapping[_Row, tuple[float, float]]:
    """Bytes in all and calls by row, of a step of one rank of the pipeline."""
    found: dict[_Row, tuple[float, float]] = {}
    runs = job.runs
    mine = [(stage, kind) for stage, kind in job.programs if job.schedule.owners[stage] == rank]
    for stage, kind in mine:
        for times, posted in _posted_ops(job.programs.shared[job.programs.which[stage, kind]]):
            sent: dict[tuple[tuple[str, ...], str], float] = {}
            for one in posted:
                for axes, name, nbytes in _collective(one.op, one.operands, mesh):
                    sent[axes, name] = sent.get((axes, name), 0.0) + nbytes
            for (axes, name), nbytes in sent.items():
                _add(
                    found, _Row(axes, name, _covering_action(job, axes, name, kind)), nbytes, times * runs[stage, kind]
                )
    for t in job.transfers:
        (source, _), (target, _) = t.source, t.target
        if job.schedule.owners[source] != rank or job.schedule.owners[target] == rank:
            continue
        kind = t.kind if (source, t.kind) in runs else "I" if t.kind == "B" else UPDATE
        _add(found, _Row((PIPELINE,), "permute", ""), float(t.types[0].local_bytes()), runs[source, kind])
    return found


def _posted_ops(program: Program, times: int = 1) -> Iterator[tuple[int, Sequence[LeafOp]]]:
    """Ops without a body, and how often they run; those that are posted together come together, as a call of NCCL's."""
    for step in program.steps:
        operands = program.step_types(step)[0]
        op = as_nested(step.op)
        if op is None or op.at_once or op.overlaps:
            yield times, tuple(leaves(step.op, operands))
        else:
            yield from _posted_ops(op.body, times * op.times)


def _add(found: dict[_Row, tuple[float, float]], row: _Row, nbytes: float, count: float) -> None:
    total, calls = found.get(row, (0.0, 0.0))
    if nbytes and count:
        found[row] = total + nbytes * count, calls + count


def _collective(op: Op, operands: tuple[TensorType, ...], mesh: Mesh) -> Iterator[tuple[tuple[str, ...], str, float]]:
    """Axes, op and bytes of what an op sends, none of one that sends nothing."""
    pattern = op.pattern(*operands)
    if not communicates(pattern):
        return
    members = op.members(operands[0])
    named = {a.partition(".")[0] for a in members}
    axes = tuple(a for a in mesh.axes if a in named)
    whole = _size(mesh, axes)
    if whole == 1:
        return
    if isinstance(pattern, Groups) and pattern.kind in OPS:
        kind, nbytes, part = pattern.kind, float(pattern.nbytes.max()), pattern.members.shape[1]
        yield axes, kind, nbytes * _received_share(kind, part) / _received_share(kind, whole)
        return
    nbytes = float(op.received_bytes(*operands).max(initial=0))
    yield axes, "all_to_all", nbytes / _received_share("all_to_all", whole)


def _received_share(op: str, members: int) -> float:
    """Bytes that a member receives by an op, over those that it holds before: of a ring, or of messages."""
    demand = Demand((), op, 1.0)
    if demand.shifts:
        return 1.0
    part = (members - 1) / members
    return {("S", "U"): members - 1.0, ("P", "U"): 2 * part}.get(demand.letters, part)


def _size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def _covering_action(job: Job, axes: tuple[str, ...], op: str, kind: str) -> str:
    """The kind of action behind whose compute a collective of another runs."""
    if not {*axes} <= {*BATCH, *SEQUENCE}:
        return ""
    made = Demand(axes, op, 1.0).letters
    if made[:1] == ("P",) and kind in (*SUMMING, "B", "W"):
        return "update" if kind in SUMMING else kind
    return kind if made == ("S", "U") and kind not in SUMMING and job.strategy.gathers_ahead else ""


def _compute_seconds(job: Job, rank: int, kind: str, fabric: Fabric) -> float:
    """Seconds that a rank computes in all its actions of a kind; before the update in those of one microbatch."""
    runs = job.runs
    kinds = ("B", "I", "W") if kind == "update" else (kind,)
    total = 0.0
    for (stage, own), number in job.programs.which.items():
        if job.schedule.owners[stage] == rank and own in kinds:
            once = sum(
                times * price(pattern, fabric).seconds
                for times, op, operands in program_leaves(job.programs.shared[number])
                if isinstance(pattern := op.pattern(*operands), Work)
            )
            total += once * (1 if kind == "update" else runs[stage, own])
    return total
