"""`Fold` and `JobSettings`: what a simulation of a job folds, and what it assumes."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.core import validation
from shardplan.errors import ShardplanError


@dataclass(frozen=True, slots=True)
class Fold:
    """What is worked out once for all that is alike; no switch changes a result by more than rounding.

    Args:
        layers: A body that runs often is one map, raised to a power.
        prices: An op on the same local types in the same place is priced once.
        ranks: The devices of a stage are one, which stands for them; without, each is followed alone.

    >>> Fold.nothing().layers
    False
    """

    layers: bool = True
    prices: bool = True
    ranks: bool = True

    @staticmethod
    def nothing() -> Fold:
        """Return the switches that fold nothing."""
        return Fold(layers=False, prices=False, ranks=False)


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What is assumed of a host and of streams.

    Args:
        overlap: Whether collectives and copies have streams of their own; else all ops of a device are in one stream.
        launch: Seconds in which a host issues an op; None for the device's.
        host_bytes_per_second: Of the link over which a device offloads; by default that of PCIe 4 x16, as delivered.
        contention: Whether what is under way at once shares links, whatever stage and stream it is of.
        free: What costs nothing: names of ops, of axes (`tensor`), of levels (`node`), or `messages`.
        rendezvous: Whether a message between stages goes once its receiver has come to it, and waits for it; else it
            goes as soon as it is made, or as `CompiledJob.is_rendezvous` says.
        algorithm: As `hardware.prices.cost.price` takes it.
        frameworks: Whether ops go as training frameworks run them (see `framework_ops`), or one by one, as ours do.

    Raises `ShardplanError` for what is none.
    """

    overlap: bool = True
    launch: float | None = None
    host_bytes_per_second: float = 25e9
    free: tuple[str, ...] = ()
    algorithm: str = "auto"
    contention: bool = False
    rendezvous: bool = False
    frameworks: bool = True

    def __post_init__(self) -> None:
        validation.flag("simulate: overlap", self.overlap)
        if self.launch is not None:
            validation.number("simulate: launch", self.launch, ShardplanError)
        if not self.host_bytes_per_second > 0:
            raise ShardplanError(
                f"simulate: host_bytes_per_second={self.host_bytes_per_second}; legal is a number above 0"
            )
        object.__setattr__(self, "free", validation.names("simulate: free", self.free))
