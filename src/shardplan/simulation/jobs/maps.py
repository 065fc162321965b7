"""`ActionMap`: a program as a matrix of (max,+), from when streams and inputs are there to when they are again.

Entries are the streams of a rank, in the job's order; then when what it reads of an earlier action of the microbatch
was done; then its inputs from other stages. Rows are the streams; then when its first op starts, and its last one ends;
then its results for other stages. So actions are put together exactly, whoever was free first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.hardware.prices.fabric import Floats
from shardplan.simulation.jobs.settings import JobSettings
from shardplan.simulation.jobs.streams import OpSpan, StreamRun
from shardplan.simulation.jobs.timing import COMPUTE, COPY, Node, TimedOp


@dataclass(frozen=True, slots=True, eq=False)
class ActionMap:
    """What an action does with the times of a rank; `streams` are the job's, HOST first."""

    nodes: tuple[Node, ...]
    streams: tuple[str, ...]
    earlier: tuple[str, ...]  # inputs that an earlier action of the microbatch, or of the stage, has made
    taken: tuple[str, ...]  # inputs from other stages
    sent: tuple[str, ...]  # results for other stages
    launch: float
    one: str | None
    matrix: Floats  # float64 [streams + 2 + sent, streams + 1 + taken]
    even: bool  # whether the devices of a stage all take as long in each of its ops
    copy: TimedOp | None = None  # where it is a copy to the host or back
    waits: bool = False  # whether it begins when all is taken, and sends when its kernels are done

    def opened(self, entry: Sequence[float]) -> list[OpSpan]:
        """Return the ops of the action that begins with these times: [streams + 1 + taken]."""
        spans: list[OpSpan] = []
        if self.copy is not None:
            begin, end = (self.matrix + np.array(entry)).max(axis=1)[len(self.streams) :][:2].tolist()
            return [OpSpan(self.copy, begin, begin, end, (), ())]
        _run(self, list(entry), spans)
        return spans


def _run(one: ActionMap, entry: Sequence[float], spans: list[OpSpan]) -> StreamRun:
    n = len(one.streams)
    values = dict.fromkeys(one.earlier, entry[n]) | dict(zip(one.taken, entry[n + 1 :], strict=True))
    values = {name: at for name, at in values.items() if at > -np.inf}
    run = StreamRun(dict(zip(one.streams, entry, strict=False)), values, one.launch, one=one.one, spans=spans)
    run.hold_streams(one.taken if one.waits else ())
    run.run(one.nodes)
    return run


def mapped(
    nodes: tuple[Node, ...],
    streams: tuple[str, ...],
    names: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]],
    settings: JobSettings,
    launch: float,
    fold: bool,
    even: bool,
    waits: bool = False,
) -> ActionMap:
    """Return the map of a program's ops; `names` are of its inputs from earlier, those taken, and results sent.

    With `waits` its streams wait for what is taken, but for those of parameters: a schedule receives before it runs a
    pass (Megatron's `recv_backward`, the waits of `torch.distributed.pipelining`), and what a checkpoint computes again
    comes behind that. It sends when the kernels of the pass are done, gradients of parameters among them
    (`send_backward`): what is sent waits for the stream of compute, but not for reductions.
    """
    earlier, taken, sent = names
    n = len(streams)
    unit = np.full((n + 1 + len(taken),) * 2, -np.inf)
    np.fill_diagonal(unit, 0.0)
    values = dict.fromkeys(earlier, unit[n]) | dict(zip(taken, unit[n + 1 :], strict=True))
    one = None if settings.overlap else COMPUTE
    run = StreamRun(dict(zip(streams, unit, strict=False)), values, launch, one=one, fold=fold, later=np.maximum)
    run.hold_streams(taken if waits else ())
    run.run(nodes)
    # An action of no op is where its stream, and what it waits for, are.
    still = np.maximum.reduce([unit[streams.index(COMPUTE)], *unit[n:]])
    first, last = (still if at is None else at for at in (run.first, run.last))
    goes = run.free[COMPUTE] if waits else np.full(n + 1 + len(taken), -np.inf)
    rows = [*run.free.values(), first, last, *(np.maximum(goes, run.values.get(name, goes)) for name in sent)]
    return ActionMap(nodes, streams, earlier, taken, sent, launch, one, np.array(rows), even, waits=waits)


def copied(copy: TimedOp, streams: tuple[str, ...], overlap: bool) -> ActionMap:
    """Return the map of a copy to the host or back: after what was done earlier, once compute has come to it."""
    n = len(streams)
    matrix = np.full((n + 2, n + 1), -np.inf)
    matrix[np.arange(n), np.arange(n)] = 0.0
    own, compute = streams.index(COPY if overlap else COMPUTE), streams.index(COMPUTE)
    start = np.full(n + 1, -np.inf)
    start[[own, compute, n]] = 0.0
    matrix[own], matrix[n], matrix[n + 1] = start + copy.cost.seconds, start, start + copy.cost.seconds
    return ActionMap((), streams, (), (), (), 0.0, None if overlap else COMPUTE, matrix, even=True, copy=copy)
