"""The seconds of steps under schedules that have no formula here: those of their lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardplan.simulation.closed.chunk_kinds import ChunkKinds
from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.sweep import StageSeconds, closed_step, compile_schedule, sweep

Floats = np.ndarray
Ints = np.ndarray


class StageMessages(NamedTuple):
    """Seconds of a message from a stage to the next, [n]: to another unit of devices, and within one of so many stages.

    Units are those of the innermost level; what goes further counts as going furthest.
    """

    far: Floats
    near: Floats
    stages: Floats

    def between(self, stages: int) -> Floats:
        """Return those between so many stages, in order, [n, stages - 1]."""
        crossed = np.arange(1, stages) % self.stages[:, None] == 0
        return np.where(crossed, self.far[:, None], self.near[:, None])


class StageTimes(NamedTuple):
    """Seconds of a microbatch by kind of chunk: arrays [kinds, n]; of messages between chunks and of once a step [n].

    `weight` is the part of `backward` that makes gradients of parameters; `ahead` and `ahead_back` are what a rank that
    waits for a pass, forward or back, takes less for it; `hidden_forward` and `hidden_backward` what passes take less
    where two run together (`pair_overlap`); `send`, `send_near` and `near_stages` are `messages`, column by column.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    ahead: Floats
    ahead_back: Floats
    hidden_forward: Floats
    hidden_backward: Floats
    send: Floats
    after: Floats
    send_near: Floats
    near_stages: Floats

    @property
    def messages(self) -> StageMessages:
        """The messages between chunks."""
        return StageMessages(self.send, self.send_near, self.near_stages)

    @property
    def hidden_seconds(self) -> Floats:
        """What a microbatch takes less on a chunk whose passes all run beside others, [kinds, n]."""
        return self.hidden_forward + self.hidden_backward

    def of_chunks(self, rendezvous: bool = False) -> StageSeconds:
        """Return what sweeps take of times by chunk, [n, chunks] each: with messages, and what comes once behind."""
        send = self.messages.between(self.forward.shape[1])
        passes = self.forward, self.backward - self.weight, self.weight
        less = self.ahead, self.ahead_back, self.hidden_forward, self.hidden_backward
        return StageSeconds(*passes, send, send, np.zeros_like(self.after), self.after, *less, rendezvous=rendezvous)


def scheduled_steps(c: Configurations, kinds: ChunkKinds, stages: StageTimes, where: Ints) -> Floats:
    """Return the seconds of some steps under schedules that have formulas of their own, [n of `where`]."""
    found = np.zeros(len(where))
    for at, (name, pipeline, interleave, m) in _alike(c, where):
        order = compile_schedule(name, pipeline, m, interleave)
        found[at] = closed_step(order, _chunk_seconds(kinds, stages, where[at]), near=pipeline > 1)
    return found


def joint_shares(c: Configurations, kinds: ChunkKinds, stages: StageTimes, where: Ints) -> tuple[Floats, Floats]:
    """Return what part of some steps is left where passes that run together hide what they do, [n of `where`].

    By events of both, so that a step is never longer for it. And the seconds that all ranks take less, [n of `where`].
    """
    share, hidden = np.zeros((2, len(where)))
    for at, (name, pipeline, interleave, m) in _alike(c, where):
        alone, joint = (compile_schedule(name, pipeline, m, interleave, together=x) for x in (False, True))
        seconds = _chunk_seconds(kinds, stages, where[at])
        share[at] = sweep(joint, seconds).makespan / sweep(alone, seconds).makespan
        there, back = (x.sum(axis=0) for x in joint.lists.joint_counts())
        hidden[at] = seconds.hidden_forward @ there + seconds.hidden_backward @ back
    return share, hidden


def _alike(c: Configurations, where: Ints) -> Iterator[tuple[Ints, tuple[str, int, int, int]]]:
    """Yield places in `where` of one schedule: its name, ranks, chunks a rank and microbatches."""
    columns = [c.columns[name][where] for name in ("schedule", "pipeline", "interleave")]
    keys, back = np.unique(np.stack([*columns, c.microbatches[where]]), axis=1, return_inverse=True)
    for k, (schedule, pipeline, interleave, m) in enumerate(keys.T.tolist()):
        at = np.flatnonzero(back.reshape(-1) == k)
        yield at, (CODES["schedule"][schedule], pipeline, interleave, m)


def _chunk_seconds(kinds: ChunkKinds, stages: StageTimes, where: Ints) -> StageSeconds:
    """What chunks take of configurations of one pipeline, without what comes once."""
    of_chunk = kinds.pipelines[int(kinds.which[where[0]])].of_chunk
    made = StageTimes(*(x[where] if x.ndim == 1 else x[of_chunk][:, where].T for x in stages))
    return made._replace(after=np.zeros(len(where))).of_chunks()
