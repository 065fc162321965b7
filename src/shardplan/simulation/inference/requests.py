"""`Requests`: what requests are like; and the forward steps of a model that answers them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardplan.core import validation
from shardplan.errors import ShardplanError
from shardplan.strategy.model import Model
from shardplan.strategy.training import OPTIMIZERS

OBJECTIVES = ("step", "latency", "tokens")


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests that are alike, and how many a replica answers at once.

    Args:
        prompt: Tokens of a prompt.
        output: Tokens of an answer; the first comes of the prompt, each other of a step of its own.
        concurrency: Sequences in flight in each replica.

    Raises `ShardplanError` for what is no whole number from 1 on.

    >>> Requests(2048, 256, 32).lengths
    (2176,)
    """

    prompt: int
    output: int
    concurrency: int

    def __post_init__(self) -> None:
        """Refuse other values."""
        for name in ("prompt", "output", "concurrency"):
            validation.whole_number(f"requests: {name}", getattr(self, name), 1, kind=ShardplanError)

    @property
    def positions(self) -> int:
        """The positions of a sequence's cache."""
        return self.prompt + self.output

    @property
    def lengths(self) -> tuple[int, ...]:
        """The mean number of positions that a token's step attends to; of a half the whole numbers beside it."""
        total = 2 * self.prompt + self.output  # of steps 1 to output - 1, which attend to prompt + k
        return tuple(dict.fromkeys((total // 2, -(-total // 2))))


def forward_model(model: Model, sequence: int, cache: int) -> Model:
    """Return the forward step of a model that adds so many tokens to a cache of so many positions.

    Raises `ShardplanError` for a model that has no cache, or fewer positions.
    """
    if "cache" not in model.fields:
        raise ShardplanError(f"serving {model.name}: it has no cache of keys and values; legal are decoders")
    settings = {"training", "optimizer", "precision", "model_type", *(n for o in OPTIMIZERS.values() for n in o.fields)}
    said: dict[str, Any] = {name: value for name, value in model.fields.items() if name not in settings}
    said |= {"training": False, "seq": sequence, "cache": cache, "batch": 2}
    return Model.load(model.name, **said)
