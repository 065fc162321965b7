"""The price of a fused operator: a computation whose tiles leave for their destination as soon as they are computed.

With C the seconds of the computation, X those of its bytes on the wire, l the latency, s a signal, W the ranks, n the
tiles of a destination, f = (W - 1) / W, and e the tax of cutting the computation into tiles:

    unfused = C + copy + X + l
    fused   = max(e C, e C / (n W) + X, f e C + X / (n (W - 1))) + l + n (W - 1) s

The three terms are: the computation hides the wire; the wire hides the computation, once its first tile is there; the
last remote tile leaves when all remote ones are computed, since they come first. An all-reduce in two shots gathers
its sums in the end. Everything is an array, so that a simulation may price many shapes at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core import border
from shardplan.core.decoding import decode_toml
from shardplan.errors import ParseError, TopologyError, excerpt
from shardplan.hardware.toml_fields import basic_string, check_keys, parse_quantity
from shardplan.hardware.units import exact, parse_rate, parse_seconds

Floats = np.ndarray
Numbers = float | Floats

TILE_COUNTS = (1, 2, 4, 8, 16)  # tiles of a destination that are tried
LEAST_GAIN = 0.05  # of the unfused seconds what a fused variant must save
RATES = ("product", "vector", "bags")  # of what rates of computation are known
_LENGTHS = ("latency", "signal")
_SPEEDS = ("bandwidth", "copy_bandwidth")


@dataclass(frozen=True, slots=True)
class FusedConstants:
    """What a transport and its kernels take; `source` says where the numbers come from.

    Args:
        backend: The transport's name, such as `shm`, or the topology's.
        latency: Seconds from a put to its arrival.
        bandwidth: Bytes per second that leave a rank.
        copy_bandwidth: Bytes per second of a copy into a staging buffer.
        signal: Seconds of a signal and its share of a wait.
        tile_tax: Pairs of a number of tiles of a whole computation, and how many times longer it then takes.
        rates: By kind of computation what this machine reaches: `product` in FLOP/s, `vector` and `bags` in B/s read.
        source: Where the numbers come from.

    Raises `TopologyError` for numbers out of their range.
    """

    backend: str
    latency: float
    bandwidth: float
    copy_bandwidth: float
    signal: float
    tile_tax: tuple[tuple[int, float], ...] = ((1, 1.0),)
    rates: tuple[tuple[str, float], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no length, no speed and no tax."""
        what = f"fused constants of {self.backend}"
        for name in _LENGTHS:
            if not 0 <= getattr(self, name) < np.inf:
                raise TopologyError(f"{what}: {name} {getattr(self, name)}; legal are seconds from 0")
        for name, rate in (*((name, getattr(self, name)) for name in _SPEEDS), *self.rates):
            if not rate > 0:
                raise TopologyError(f"{what}: {name} {rate}; legal are numbers above 0")
        counts = [count for count, _ in self.tile_tax]
        if not counts or counts[0] != 1 or counts != sorted(set(counts)) or min(t for _, t in self.tile_tax) <= 0:
            text = "rising numbers of tiles from 1, each with a tax above 0"
            raise TopologyError(f"{what}: tile_tax {excerpt(self.tile_tax)}; legal are {text}")

    def tax(self, tiles: Numbers) -> Floats:
        """Return how many times longer a computation takes in so many tiles.

        Between the table's rows it is a line, behind the last one its last line goes on.

        >>> FusedConstants("x", 0, 1, 1, 0, ((1, 1.0), (2, 1.1), (4, 1.2))).tax(np.array([1, 3, 6])).round(3).tolist()
        [1.0, 1.15, 1.3]
        """
        counts, taxes = np.array(self.tile_tax).T
        many = np.asarray(tiles, dtype=np.float64)
        slope = (taxes[-1] - taxes[-2]) / (counts[-1] - counts[-2]) if len(counts) > 1 else 0.0
        return np.interp(many, counts, taxes) + np.maximum(many - counts[-1], 0) * max(slope, 0.0)

    def rate(self, kind: str) -> float | None:
        """Return the rate of a kind of computation, None where it is not known."""
        return dict(self.rates).get(kind)

    def __str__(self) -> str:
        """Return the text of its file."""
        lines = [f"backend = {basic_string(self.backend)}", f"source = {basic_string(self.source)}"]
        lines += [f'{name} = "{exact(getattr(self, name), "s")}"' for name in _LENGTHS]
        lines += [f'{name} = "{exact(getattr(self, name), "B/s")}"' for name in _SPEEDS if _finite(getattr(self, name))]
        lines += ["[tile_tax]", *(f"{count} = {tax!r}" for count, tax in self.tile_tax)]
        if self.rates:
            lines += ["[rates]", *(f"{kind} = {rate!r}" for kind, rate in self.rates)]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str, what: str = "fused constants") -> FusedConstants:
        """Read the text of a file: TOML, with lengths and speeds as strings with a unit.

        Raises `ParseError` where it is malformed, `TopologyError` where a key or a value is not legal.
        """
        try:
            data = decode_toml(text)
        except ParseError as error:
            raise ParseError(f"{what} is no TOML: {error}") from None
        check_keys(what, data, ("backend", "source", *_LENGTHS, *_SPEEDS, "tile_tax", "rates"))
        found: dict[str, float] = {}
        for names, parser, like in ((_LENGTHS, parse_seconds, "2 us"), (_SPEEDS, parse_rate, "10 GB/s")):
            for name in names:
                value = data.get(name, None if name in _LENGTHS else np.inf)
                if isinstance(value, str):
                    value = parse_quantity(f"{what}: {name}", value, parser)
                elif value is not np.inf:
                    raise TopologyError(
                        f"{what}: {name} is {excerpt(value)}; legal is a string with a unit, as {like!r}"
                    )
                found[name] = value
        taxes = _numbers(f"{what}: tile_tax", data.get("tile_tax", {"1": 1.0}))
        if strange := [count for count in taxes if not count.isdecimal()]:
            raise TopologyError(f"{what}: tile_tax of {excerpt(strange[0])}; legal are numbers of tiles")
        rates = _numbers(f"{what}: rates", data.get("rates", {}))
        check_keys(f"{what}: rates", rates, RATES)
        return cls(
            border.text(f"{what}: backend", data.get("backend", ""), TopologyError),
            **found,
            tile_tax=tuple((int(count), tax) for count, tax in taxes.items()),
            rates=tuple(rates.items()),
            source=border.text(f"{what}: source", data.get("source", ""), TopologyError),
        )

    @classmethod
    def load(cls, path: str | Path) -> FusedConstants:
        """Read a file; raises `TopologyError` where there is none, and as `parse`."""
        try:
            return cls.parse(Path(path).read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise TopologyError(f"fused constants {str(path)!r} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ParseError(f"fused constants {str(path)!r} are not UTF-8 text") from error

    def save(self, path: str | Path) -> None:
        """Write a file that `load` reads back."""
        Path(path).write_text(str(self), encoding="utf-8")


def _finite(value: float) -> bool:
    return bool(np.isfinite(value))


def _numbers(what: str, data: Any) -> dict[str, float]:
    if not isinstance(data, Mapping):
        raise TopologyError(f"{what} is {excerpt(data)}; legal is a table of numbers")
    return {str(key): border.number(f"{what}: {key}", value, TopologyError) for key, value in data.items()}


@dataclass(frozen=True, slots=True, eq=False)
class FusedWork:
    """A computation and the collective behind it, or many of them: numbers, or arrays of one shape.

    Args:
        seconds: Of the computation on one device.
        nbytes: Of the result that a rank computes: what it sends to all others where it keeps none.
        ranks: In a group, at least 2.
        reduces: Whether the collective is an all-reduce. Its addends have `nbytes`, its sums `sum_bytes`.
        sum_bytes: Bytes of the whole result of an all-reduce, on every rank; 0 of an all-to-all.
    """

    seconds: Numbers
    nbytes: Numbers
    ranks: int | Floats
    reduces: bool = False
    sum_bytes: Numbers = 0.0

    @property
    def remote(self) -> Numbers:
        """The part of a rank's result that is for others, f."""
        return (self.ranks - 1) / self.ranks

    def gather(self, constants: FusedConstants) -> Numbers:
        """Return the seconds in which every rank gets the sums of all others."""
        if not self.reduces:
            return 0.0
        return self.sum_bytes * self.remote / constants.bandwidth + constants.latency


@dataclass(frozen=True, slots=True)
class FusedVariant:
    """A way to run a pair: `unfused`, `fused` (of an all-to-all), or `one_shot` and `two_shot` (of an all-reduce).

    `tiles` are those of a destination, 0 of `unfused`.
    """

    kind: str
    tiles: int = 0

    def __str__(self) -> str:
        """Return its name, with its tiles."""
        return f"{self.kind} n={self.tiles}" if self.tiles else self.kind


UNFUSED = FusedVariant("unfused")


def unfused_seconds(work: FusedWork, constants: FusedConstants) -> Floats:
    """Return the seconds of the pair one after the other on the same transport: compute, copy, send.

    >>> one = FusedConstants("x", latency=1e-6, bandwidth=1e9, copy_bandwidth=4e9, signal=0)
    >>> round(float(unfused_seconds(FusedWork(1e-3, 2e6, 2), one)) * 1e3, 3)  # 1 + 0.25 + 1 + 0.001
    2.251
    """
    sent = work.nbytes * work.remote
    moved = sent / constants.copy_bandwidth + sent / constants.bandwidth + constants.latency
    return np.asarray(work.seconds + moved + work.gather(constants))


def fused_seconds(work: FusedWork, tiles: int, constants: FusedConstants) -> Floats:
    """Return the seconds with so many tiles a destination; of an all-reduce by two shots.

    >>> one = FusedConstants("x", latency=1e-6, bandwidth=1e9, copy_bandwidth=4e9, signal=0)
    >>> round(float(fused_seconds(FusedWork(1e-3, 2e6, 2), 4, one)) * 1e3, 3)
    1.126
    """
    wire = work.nbytes * work.remote / constants.bandwidth
    return np.asarray(_overlap_seconds(work, wire, tiles, constants) + work.gather(constants))


def one_shot_seconds(work: FusedWork, constants: FusedConstants) -> Floats:
    """Return the seconds of an all-reduce whose ranks send all addends to all, in one tile each, and add them up."""
    wire = work.nbytes * (work.ranks - 1) / constants.bandwidth
    # All ranks need the same addends: the first is sent when all are computed.
    sent = constants.latency + (work.ranks - 1) * constants.signal
    return np.asarray(work.seconds + wire + sent)


def _overlap_seconds(work: FusedWork, wire: Numbers, tiles: int, constants: FusedConstants) -> Floats:
    w, n = work.ranks, tiles
    busy = constants.tax(n * w) * work.seconds
    last = work.remote * busy + wire / (n * (w - 1))
    hidden = np.maximum(np.maximum(busy, busy / (n * w) + wire), last)
    return hidden + constants.latency + n * (w - 1) * constants.signal


def variants(reduces: bool) -> tuple[FusedVariant, ...]:
    """Return every way to run an all-to-all, or an all-reduce, the unfused one first."""
    if not reduces:
        return (UNFUSED, *(FusedVariant("fused", n) for n in TILE_COUNTS))
    return (UNFUSED, FusedVariant("one_shot", 1), *(FusedVariant("two_shot", n) for n in TILE_COUNTS))


def variant_seconds(work: FusedWork, variant: FusedVariant, constants: FusedConstants) -> Floats:
    """Return the seconds of a variant."""
    match variant.kind:
        case "unfused":
            return unfused_seconds(work, constants)
        case "one_shot":
            return one_shot_seconds(work, constants)
        case _:
            return fused_seconds(work, variant.tiles, constants)


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecision:
    """What every variant takes, `seconds` [variants, ...] in their order, and which is chosen, `index` [...]."""

    variants: tuple[FusedVariant, ...]
    seconds: Floats
    index: Floats

    @property
    def best_variant(self) -> FusedVariant:
        """The variant that is chosen for one piece of work."""
        return self.variants[int(self.index)]


def decide(work: FusedWork, constants: FusedConstants, least_gain: float = LEAST_GAIN) -> FusedDecision:
    """Return the fastest variant; a fused one only where it saves `least_gain` of the unfused seconds or more.

    >>> one = FusedConstants("x", latency=1e-6, bandwidth=1e9, copy_bandwidth=4e9, signal=1e-6)
    >>> print(decide(FusedWork(1e-3, 2e6, 2), one).best_variant)
    fused n=16
    >>> print(decide(FusedWork(1e-3, 2e3, 2), one).best_variant)
    unfused
    """
    ways = variants(work.reduces)
    found = np.stack(np.broadcast_arrays(*(variant_seconds(work, way, constants) for way in ways)))
    best = 1 + found[1:].argmin(axis=0)
    least = found[1:].min(axis=0)
    index = np.where(least <= (1 - least_gain) * found[0], best, 0)
    return FusedDecision(ways, found, index)
