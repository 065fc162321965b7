"""`ServingSpace`: the strategies that serve a model on so many devices, in an order, as columns.

A frame says degrees and whether a prompt's sequence is cut over the tensor axis; inside it vary the groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardplan.core import validation
from shardplan.errors import ShardplanError
from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.inference.requests import Requests
from shardplan.simulation.searching.space import divisors
from shardplan.strategy.limits import ModelLimits
from shardplan.strategy.model import Model

Ints = np.ndarray
FRAME = ("data", "tensor", "pipeline", "context", "expert", "sequence_parallel")
GATHER = CODES["context_kind"].index("gather")


@dataclass(frozen=True, slots=True, eq=False)
class ServingSpace:
    """Frames as columns [frames], each with the same groups inside.

    >>> model = Model.load("gpt", layers=4, hidden=64, heads=4, seq=16, vocab=64)
    >>> ServingSpace.of(model, 4, Requests(8, 4, 6)).count
    56
    """

    frames: Ints  # int64 [frames, fields of FRAME]
    groups: tuple[int, ...]  # sequences of a group
    concurrency: int
    attention: int

    @staticmethod
    def of(model: Model, devices: int, requests: Requests, attention: str | None = None) -> ServingSpace:
        """Enumerate what is legal.

        Degrees multiply to `devices`, also where they are no powers of two: `tensor` up to the heads, `pipeline` up to
        the layers; `context` divides the prompt and gathers its keys, in a model without experts; `expert` divides the
        experts and a stage. `data` are replicas. The sequences of a group divide the concurrency.

        Raises `ShardplanError` where nothing is legal.
        """
        validation.whole_number("search: devices", devices, 1, kind=ShardplanError)
        rows = list(_frames(ModelLimits.of(model), devices, requests.prompt))
        if not rows:
            raise ShardplanError(f"search: no strategy of {devices} devices that serves is legal")
        code = CODES["attention"].index(attention)
        return ServingSpace(
            np.array(rows, dtype=np.int64), tuple(divisors(requests.concurrency)), requests.concurrency, code
        )

    def live(self, frames: Ints) -> np.ndarray:
        """Return that every strategy inside some frames is searched."""
        return np.ones((len(frames), self.inside), dtype=bool)

    @property
    def idle(self) -> int:
        """None."""
        return 0

    @property
    def inside(self) -> int:
        """How many strategies a frame has."""
        return len(self.groups)

    @property
    def count(self) -> int:
        """How many strategies there are."""
        return len(self.frames) * self.inside

    @property
    def starts(self) -> Ints:
        """Each frame has one order of its axes."""
        return np.arange(len(self.frames) + 1)

    @property
    def floor_order(self) -> int:
        """The code of that order."""
        return 0

    def pairs(self, frames: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the orders of some frames, one each."""
        return np.arange(len(frames)), np.zeros(len(frames), dtype=np.int64), frames

    def columns(self, frames: Ints, orders: Ints | int, inside: Ints | int) -> Configurations:
        """Return strategies by their frames, codes of orders and places of `groups`: arrays [n], or one for all."""
        said = dict(zip(FRAME, self.frames[frames].T, strict=True))
        said |= {
            "microbatch": np.array(self.groups, dtype=np.int64)[inside],
            "global_batch": said["data"] * self.concurrency,
            "context_kind": np.where(said["context"] > 1, GATHER, 0),
            "order": orders,
            "attention": self.attention,
            "schedule": CODES["schedule"].index("1f1b"),
        }
        return Configurations.filled(len(frames), said)

    def one(self, index: int) -> Configurations:
        """Return the strategy at a place of the order."""
        frame, inside = divmod(index, self.inside)
        return self.columns(np.array([frame]), 0, inside)


def _frames(limits: ModelLimits, devices: int, prompt: int) -> Iterator[tuple[int, ...]]:
    for tensor in (t for t in divisors(devices) if t <= limits.heads):
        for pipeline in (p for p in divisors(devices // tensor) if p <= limits.layers):
            rest = devices // tensor // pipeline
            for context in (c for c in divisors(rest) if prompt % c == 0 and (c == 1 or limits.experts == 1)):
                for expert in (e for e in divisors(limits.experts) if rest * tensor % e == 0):
                    for parallel in (0, 1) if tensor > 1 else (0,):
                        yield rest // context, tensor, pipeline, context, expert, parallel
