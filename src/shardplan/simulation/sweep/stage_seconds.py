"""`StageSeconds`: what the chunks of a pipeline take, for many configurations at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from shardplan.core import validation
from shardplan.errors import ShardplanError, excerpt


@dataclass(frozen=True, slots=True, eq=False)
class StageSeconds:
    """Seconds of n configurations on `chunks` chunks of the layers, in the order of the forward.

    Each array is finite, at least 0 and of floats. What one microbatch takes: `forward`, `backward_input` and
    `backward_weight` [n, chunks], recomputation and exposed communication within the chunk included; a whole backward
    takes the sum of the last two. `send` [n, chunks - 1] is a message from a chunk to the next, `send_back` one the
    other way (`send`, if it is not given). `before` and `after` [n] come once a step on every rank (none, if they are
    not given). `ahead` and `ahead_back` [n, chunks] are what a forward and a backward take less on a rank that waits
    for their message, `hidden_forward` and `hidden_backward` [n, chunks] what a forward and a whole backward take less
    where a schedule runs them together (nothing, if they are not given). With `rendezvous` a message begins once its
    receiver has done all before the pass that takes it, and waits for it; else as soon as it is made. Raises
    `ShardplanError` for any other shape or value.

    Source: DESIGN, simulation: stage-level events.

    >>> stages = StageSeconds.equal(4, forward=1.0, backward_input=2.0, backward_weight=1.0)
    >>> len(stages), stages.chunks
    (1, 4)
    """

    forward: np.ndarray
    backward_input: np.ndarray
    backward_weight: np.ndarray
    send: np.ndarray
    send_back: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    before: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    after: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    ahead: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    ahead_back: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    hidden_forward: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    hidden_backward: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    rendezvous: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        validation.flag("StageSeconds: rendezvous", self.rendezvous, ShardplanError)
        forward = np.asarray(self.forward)
        if forward.ndim != 2 or not forward.shape[1]:
            raise ShardplanError(f"StageSeconds: forward has the shape {forward.shape}; legal is [n, chunks]")
        n, chunks = forward.shape
        given = {"send_back": self.send, "before": np.zeros(n), "after": np.zeros(n)}
        names = "ahead", "ahead_back", "hidden_forward", "hidden_backward"
        given |= dict.fromkeys(names, np.zeros(forward.shape))
        for each in fields(self)[:-1]:
            value = getattr(self, each.name)
            array = np.asarray(given[each.name] if value is None else value)
            between, once = each.name.startswith("send"), each.name in ("before", "after")
            said = "[n]" if once else "[n, chunks - 1]" if between else "[n, chunks]"
            wanted = (n,) if once else (n, chunks - between)
            if array.shape != wanted or array.dtype.kind not in "fiu":
                raise ShardplanError(
                    f"StageSeconds: {each.name} is {array.dtype} of the shape {array.shape}; "
                    f"legal are floats {said}, here {wanted}"
                )
            array = np.asarray(array, dtype=np.float64)
            if not (np.isfinite(array) & (array >= 0)).all():
                wrong = array[~(np.isfinite(array) & (array >= 0))][0]
                raise ShardplanError(
                    f"StageSeconds: {each.name} has {excerpt(float(wrong))}; legal are finite seconds of at least 0"
                )
            object.__setattr__(self, each.name, array)

    @property
    def chunks(self) -> int:
        """How many chunks the layers are cut into."""
        return self.forward.shape[1]

    def __len__(self) -> int:
        """How many configurations there are."""
        return self.forward.shape[0]

    def __getitem__(self, which: slice | np.ndarray) -> StageSeconds:
        """Return the configurations that a slice, a mask or an array of indices says."""
        arrays = (getattr(self, each.name)[which] for each in fields(self)[:-1])
        return StageSeconds(*arrays, rendezvous=self.rendezvous)

    @staticmethod
    def equal(
        chunks: int,
        forward: float | Sequence[float],
        backward_input: float | Sequence[float],
        backward_weight: float | Sequence[float],
        send: float | Sequence[float] = 0.0,
    ) -> StageSeconds:
        """Return configurations whose chunks are alike: each argument one number, or one a configuration."""
        told = (forward, backward_input, backward_weight, send)
        f, i, w, s = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x, dtype=np.float64)) for x in told))
        wide = np.ones((1, chunks))
        return StageSeconds(f[:, None] * wide, i[:, None] * wide, w[:, None] * wide, s[:, None] * wide[:, 1:])

    def table(self, part: slice = slice(None), together: bool = False, arriving: bool = False) -> np.ndarray:
        """The rows that codes of a graph point into, float [codes, n]: see `graph.code`; of some configurations.

        A pass ends as long after its message comes as it takes where it has waited: the message counts for less than
        it takes, by what is ahead. One of `rendezvous` is part of the pass that takes it. With `arriving` messages are
        as long as they take; with `together` the rows of `graph.joint_code` are there too.
        """
        forward, back, weight = (x[part].T for x in (self.forward, self.backward_input, self.backward_weight))
        ahead, ahead_back = (0.0, 0.0) if arriving else (self.ahead[part].T[1:], self.ahead_back[part].T[:-1])
        send, send_back = self.send[part].T, self.send_back[part].T
        if self.rendezvous and not arriving:
            nothing = np.zeros((1, forward.shape[1]))
            forward, back = forward + np.concatenate([nothing, send]), back + np.concatenate([send_back, nothing])
            send = send_back = 0.0
        rows = [forward, back, weight, back + weight, send - ahead, send_back - ahead_back]
        if together:
            rows += [forward - self.hidden_forward[part].T, back + weight - self.hidden_backward[part].T]
        return np.concatenate([np.zeros((1, forward.shape[1])), *rows])
