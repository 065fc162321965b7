"""`DistirModel` and `DistirPoint`: what DistIR's grid searches run, and which of it DistIR fails on.

Source: microsoft/dist-ir 7cfa1b0, `examples`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardplan.core import validation
from shardplan.errors import LayoutError
from shardplan.strategy.strategy import Strategy

# Operands for which DistIR's tables have SGD; collectives have powers of two up to the last.
_UPDATES = frozenset({2**k for k in range(1, 16)} | {12, 24, 48, 96, 192})
_MOST_DEVICES = 8192


@dataclass(frozen=True, slots=True)
class DistirModel:
    """Sizes of one of DistIR's models: with heads a GPT, without an MLP of square layers.

    Raises `LayoutError` for a size that is not a whole number.

    >>> DistirModel(12, 768, 12).heads
    12
    """

    layers: int
    hidden: int
    heads: int = 0

    def __post_init__(self) -> None:
        """Check every size."""
        for name, least in (("layers", 1), ("hidden", 1), ("heads", 0)):
            validation.whole_number(f"distir model: {name}", getattr(self, name), least)


MODELS: Mapping[str, DistirModel] = MappingProxyType(
    {
        "mlp-xs": DistirModel(8, 512),
        "mlp-small": DistirModel(16, 8192),
        "mlp-medium": DistirModel(64, 16384),
        "mlp-large": DistirModel(96, 32768),
        "gpt2-xs": DistirModel(4, 768, 12),
        "gpt2": DistirModel(12, 768, 12),
        "gpt2-medium": DistirModel(24, 1024, 16),
        "gpt2-large": DistirModel(36, 1280, 20),
        "gpt2-xl": DistirModel(48, 1600, 25),
        "gpt3": DistirModel(12, 768, 12),
        "gpt3-medium": DistirModel(24, 1024, 16),
        "gpt3-large": DistirModel(24, 1536, 16),
        "gpt3-xl": DistirModel(24, 2048, 16),
        "gpt3-2.7b": DistirModel(32, 2560, 32),
        "gpt3-6.7b": DistirModel(32, 4096, 32),
        "gpt3-13b": DistirModel(40, 5120, 40),
        "gpt3-175b": DistirModel(96, 12288, 96),
    }
)


@dataclass(frozen=True, slots=True)
class DistirPoint:
    """A configuration of DistIR's searches.

    Args:
        model: A name of `MODELS`, or sizes.
        data: Replicas.
        tensor: Devices of a tensor group; DistIR calls it horizontal parallelism.
        pipeline: Places.
        microbatches: Of a replica.
        global_batch: Rows or sequences of a step.

    Raises `LayoutError` for an unknown name or a number that is not legal. One on which DistIR fails is legal.

    >>> DistirPoint("gpt3", 2, 2, 2, 4, 64).strategy.microbatch
    8
    """

    model: str | DistirModel
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1
    global_batch: int = 1

    def __post_init__(self) -> None:
        """Check every field."""
        if isinstance(self.model, str):
            validation.choice("distir point: model", self.model, tuple(MODELS))
        for name in ("data", "tensor", "pipeline", "microbatches", "global_batch"):
            validation.whole_number(f"distir point: {name}", getattr(self, name), 1)

    @classmethod
    def of(cls, model: str | DistirModel, strategy: Strategy) -> DistirPoint:
        """Return the configuration of a strategy.

        Args:
            model: A name of `MODELS`, or sizes.
            strategy: One of data, tensor and pipeline degrees and microbatches alone.

        Raises `LayoutError` where the strategy has what DistIR does not.
        """
        batch = strategy.data * strategy.microbatch if strategy.global_batch is None else strategy.global_batch
        point = cls(model, strategy.data, strategy.tensor, strategy.pipeline, strategy.microbatches, batch)
        if point.strategy != strategy:
            raise LayoutError(
                f"distir: {strategy} has more than DistIR's strategies, which are data, tensor, pipeline, microbatch "
                f"and global_batch alone: {point.strategy}"
            )
        return point

    @property
    def sizes(self) -> DistirModel:
        """Its model's sizes."""
        return MODELS[self.model] if isinstance(self.model, str) else self.model

    @property
    def strategy(self) -> Strategy:
        """The same as a strategy; raises `LayoutError` where the batch does not divide."""
        return Strategy(
            data=self.data, tensor=self.tensor, pipeline=self.pipeline, global_batch=self.global_batch,
            microbatch=max(1, self.global_batch // (self.data * self.microbatches)),
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """Rows or sequences of a microbatch."""
        return self.global_batch // self.data // self.microbatches

    def failure(self) -> str | None:
        """Return why DistIR fails on this configuration, where it writes -1; None where it does not.

        Mistakes 6 and 7: an op that no table has raises, and tables have powers of two.

        Source: microsoft/dist-ir 7cfa1b0.

        >>> DistirPoint("mlp-xs", data=3, global_batch=66).failure()
        'an all-reduce over 3 devices: the tables have powers of two up to 8192'
        """
        if self.global_batch % self.data or self.global_batch // self.data % self.microbatches:
            return f"a batch of {self.global_batch} is not cut evenly into {self.data} x {self.microbatches}"
        if self.pipeline == 1 and self.microbatches > 1:
            return f"{self.microbatches} microbatches without a pipeline"
        return self._failure_of_gpt() if self.sizes.heads else self._failure_of_mlp()

    def _failure_of_gpt(self) -> str | None:
        """What its GPT does not take."""
        sizes, tensor = self.sizes, self.tensor
        for name in ("data", "tensor", "pipeline", "microbatches"):
            if getattr(self, name).bit_count() != 1:
                return f"{name} is {getattr(self, name)}: GPT takes powers of two"
        if self.pipeline > 1 and self.microbatches == 1:
            return "one microbatch in a pipeline"
        if tensor > sizes.heads:
            return f"{tensor} devices for {sizes.heads} heads"
        if sizes.hidden % sizes.heads or sizes.hidden % tensor:
            return f"hidden size {sizes.hidden} by {sizes.heads} heads and {tensor} devices"
        width, heads = sizes.hidden // tensor, sizes.heads // tensor
        return f"{heads} heads of a device do not fill {width} features" if width % heads else None

    def _failure_of_mlp(self) -> str | None:
        """What its MLP does not take."""
        sizes = self.sizes
        if sizes.layers < 3:
            return f"{sizes.layers} layers: the MLP has at least 3"
        if sizes.layers % self.pipeline:
            return f"{sizes.layers} layers on {self.pipeline} places"
        if sizes.hidden % self.tensor:
            return f"{sizes.hidden} features on {self.tensor} devices"
        if self.tensor > 1 and sizes.layers % 2:
            return f"{sizes.layers} layers, an odd number, cut by columns and rows in turn"
        for devices in (self.tensor, self.data):
            if devices.bit_count() != 1 or devices > _MOST_DEVICES:
                return f"an all-reduce over {devices} devices: the tables have powers of two up to {_MOST_DEVICES}"
        operands = 2 * sizes.layers // self.pipeline
        return None if operands in _UPDATES else f"SGD of {operands} operands: the tables have {sorted(_UPDATES)}"
