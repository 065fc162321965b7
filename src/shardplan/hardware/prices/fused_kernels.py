"""What the computation of a fused pair takes: that of the fused kernels, and that of the library's, which run unfused.

Seconds of a computation are a line: those of nothing, of an operation, of a byte that is read, of a byte of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from shardplan.core import validation
from shardplan.core.pattern import StepPattern, Work
from shardplan.errors import TopologyError, excerpt
from shardplan.hardware.toml_fields import check_keys

KINDS = ("product", "vector", "bags")
_TRANSPORT = ("latency", "bandwidth", "copy_bandwidth", "result_bandwidth", "signal", "tile_tax")


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Seconds to `start`, operations per second, bytes read and bytes of the result written per second."""

    start: float = 0.0
    flops: float = np.inf
    reads: float = np.inf
    writes: float = np.inf

    def seconds(self, flops: float, read: float, written: float) -> float:
        """Return the seconds of a computation.

        >>> KernelRates(1e-6, flops=1e9, writes=1e9).seconds(2e3, 5e6, 1e3)
        4e-06
        """
        return self.start + flops / self.flops + read / self.reads + written / self.writes

    def __str__(self) -> str:
        """Return its lines of a file, without what is free."""
        return "\n".join(f"{name} = {value!r}" for name, value in asdict(self).items() if 0 < value < np.inf)


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """What computations of a kind take, and the transport where it differs for them.

    Args:
        kind: `product`, `vector` (of a matrix and a thin one) or `bags`.
        fused: Of the kernels of fused operators.
        library: Of the library's, which the unfused pair runs; None where they are as fast.
        latency, bandwidth, copy_bandwidth, result_bandwidth, signal, tile_tax: As in `FusedConstants`; None where they
            are the transport's.

    Raises `TopologyError` for numbers out of their range.
    """

    kind: str
    fused: KernelRates = KernelRates()
    library: KernelRates | None = None
    latency: float | None = None
    bandwidth: float | None = None
    copy_bandwidth: float | None = None
    result_bandwidth: float | None = None
    signal: float | None = None
    tile_tax: tuple[tuple[int, float], ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no kind and no rate."""
        what = f"fused constants: kernels {excerpt(self.kind)}"
        if self.kind not in KINDS:
            raise TopologyError(f"{what}; legal are {', '.join(KINDS)}")
        for rates in (self.fused, self.library or self.fused):
            for name, value in asdict(rates).items():
                if not (0 <= value < np.inf if name == "start" else value > 0):
                    raise TopologyError(f"{what}: {name} {value}; legal are seconds from 0, and rates above 0")

    @property
    def transport(self) -> dict[str, Any]:
        """What of the transport is this kind's own, by its name in `FusedConstants`."""
        return {name: value for name in _TRANSPORT if (value := getattr(self, name)) is not None}

    def seconds(self, flops: float, read: float, written: float) -> tuple[float, float]:
        """Return the seconds by the library and by the fused kernels; the second over the first is 1 / efficiency."""
        fused = self.fused.seconds(flops, read, written)
        return fused if self.library is None else self.library.seconds(flops, read, written), fused

    def step_seconds(self, steps: Sequence[StepPattern], written: float) -> tuple[float, float]:
        """Return the seconds, as `seconds` does, of kernels whose result has so many bytes.

        What reads no other step's result computes; the rest lays out, which fused kernels do on their way.
        """
        works = [step.pattern for step in steps if isinstance(step.pattern, Work) and not step.reads]
        read = max(0.0, float(sum(work.nbytes for work in works)) - written)
        return self.seconds(float(sum(work.flops for work in works)), read, written)

    def __str__(self) -> str:
        """Return its part of a file."""
        lines = [f"[kernels.{self.kind}]", str(self.fused)]
        lines += [f"{name} = {value!r}" for name, value in self.transport.items() if name != "tile_tax"]
        if self.tile_tax is not None:
            lines += [f"tile_tax = {{ {', '.join(f'{count} = {tax!r}' for count, tax in self.tile_tax)} }}"]
        if self.library is not None:
            lines += [f"[kernels.{self.kind}.library]", str(self.library)]
        return "\n".join(line for line in lines if line)


def parse_kernels(what: str, data: Any) -> tuple[KernelConstants, ...]:
    """Read the table of kernels of a file; raises `TopologyError` for what is none."""
    found: list[KernelConstants] = []
    for kind, given in _table(what, data).items():
        here = f"{what}: {kind}"
        own = dict(_table(here, given))
        library, taxes = own.pop("library", None), own.pop("tile_tax", None)
        numbers = read_numbers(here, own)
        names = tuple(each.name for each in fields(KernelRates))
        check_keys(here, numbers, (*names, *_TRANSPORT))
        more: dict[str, Any] = {name: value for name, value in numbers.items() if name not in names}
        if taxes is not None:
            more["tile_tax"] = read_taxes(f"{here}: tile_tax", taxes)
        if library is not None:
            check_keys(f"{here}: library", _table(f"{here}: library", library), names)
            more["library"] = KernelRates(**read_numbers(f"{here}: library", library))
        own_rates = KernelRates(**{name: value for name, value in numbers.items() if name in names})
        found.append(KernelConstants(kind, own_rates, **more))
    return tuple(found)


def read_taxes(what: str, data: Any) -> tuple[tuple[int, float], ...]:
    """Read pairs of a number of tiles and its tax."""
    taxes = read_numbers(what, data)
    if strange := [count for count in taxes if not count.isdecimal()]:
        raise TopologyError(f"{what} of {excerpt(strange[0])}; legal are numbers of tiles")
    return tuple((int(count), tax) for count, tax in taxes.items())


def read_numbers(what: str, data: Any) -> dict[str, float]:
    """Read a table of numbers."""
    return {key: validation.number(f"{what}: {key}", value, TopologyError) for key, value in _table(what, data).items()}


def _table(what: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise TopologyError(f"{what} is {excerpt(data)}; legal is a table of numbers")
    return {str(key): value for key, value in data.items()}
