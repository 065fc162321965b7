"""The price of a fused operator: a computation whose tiles leave for their destination as soon as they are computed.

With C the seconds of the computation, X those of its bytes on the wire, l the latency, s a signal, W the ranks, n the
tiles of a destination, f = (W - 1) / W, and e the tax of cutting the computation into tiles:

    unfused = C + copy + X + l + R
    fused   = max(e C, e C / (n W) + X, f e C + X / (n (W - 1))) + l + n (W - 1) s + R

The three terms are: the computation hides the wire; the wire hides the computation, once its first tile is there; the
last remote tile leaves when all remote ones are computed, since they come first. R is the copy of the result out of
memory that the transport owns, where there is one. An all-reduce in two shots gathers its sums in the end; fused,
addends are sent in f32. A product of what is gathered takes the same, told backwards: X is of the gathered bytes, own
tiles come first, and the last remote one is computed when all bytes are there. Everything is an array, so that a
simulation may price many shapes at once.

C of the unfused pair is that of the library, of a fused one that of its kernels: `hardware.prices.fused_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardplan.core import validation
from shardplan.core.decoding import decode_toml
from shardplan.errors import ParseError, TopologyError, excerpt
from shardplan.hardware.prices.fused_kernels import KernelConstants, parse_kernels, read_taxes
from shardplan.hardware.toml_fields import basic_string, check_keys, parse_quantity
from shardplan.hardware.units import exact, parse_rate, parse_seconds

Floats = np.ndarray
Numbers = float | Floats

TILE_COUNTS = (1, 2, 4, 8, 16)  # tiles of a destination that are tried
LEAST_GAIN = 0.05  # of the unfused seconds what a fused variant must save
_LENGTHS = ("latency", "signal")
_SPEEDS = ("bandwidth", "copy_bandwidth", "result_bandwidth")


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
        kernels: What computations take, by kind: `product`, `vector`, `bags`.
        result_bandwidth: Bytes per second of the copy of a result out of the transport's memory, in every way.
        source: Where the numbers come from.

    Raises `TopologyError` for numbers out of their range.
    """

    backend: str
    latency: float
    bandwidth: float
    copy_bandwidth: float
    signal: float
    tile_tax: tuple[tuple[int, float], ...] = ((1, 1.0),)
    kernels: tuple[KernelConstants, ...] = ()
    source: str = ""
    result_bandwidth: float = np.inf

    def __post_init__(self) -> None:
        """Refuse what is no length, no speed and no tax."""
        what = f"fused constants of {self.backend}"
        for name in _LENGTHS:
            if not 0 <= getattr(self, name) < np.inf:
                raise TopologyError(f"{what}: {name} {getattr(self, name)}; legal are seconds from 0")
        for name in _SPEEDS:
            if not getattr(self, name) > 0:
                raise TopologyError(f"{what}: {name} {getattr(self, name)}; legal are numbers above 0")
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

    def kernel(self, kind: str) -> KernelConstants | None:
        """Return what a kind of computation takes, None where it is not known."""
        return next((each for each in self.kernels if each.kind == kind), None)

    def of_kind(self, kind: str) -> FusedConstants:
        """Return the constants of pairs of a kind: the transport's, but for what that kind has of its own.

        >>> own = KernelConstants("bags", signal=2e-6)
        >>> both = FusedConstants("x", 1e-6, 1e9, 4e9, 1e-6, kernels=(own,))
        >>> both.of_kind("bags").signal, both.of_kind("product").signal
        (2e-06, 1e-06)
        """
        own = self.kernel(kind)
        return self if own is None else replace(self, **own.transport)

    def __str__(self) -> str:
        """Return the text of its file."""
        lines = [f"backend = {basic_string(self.backend)}", f"source = {basic_string(self.source)}"]
        lines += [f'{name} = "{exact(getattr(self, name), "s")}"' for name in _LENGTHS]
        lines += [f'{name} = "{exact(getattr(self, name), "B/s")}"' for name in _SPEEDS if _finite(getattr(self, name))]
        lines += ["[tile_tax]", *(f"{count} = {tax!r}" for count, tax in self.tile_tax)]
        return "\n".join([*lines, *map(str, self.kernels)]) + "\n"

    @classmethod
    def parse(cls, text: str, what: str = "fused constants") -> FusedConstants:
        """Read the text of a file: TOML, with lengths and speeds as strings with a unit.

        Raises `ParseError` where it is malformed, `TopologyError` where a key or a value is not legal.
        """
        try:
            data = decode_toml(text)
        except ParseError as error:
            raise ParseError(f"{what} is no TOML: {error}") from None
        check_keys(what, data, ("backend", "source", *_LENGTHS, *_SPEEDS, "tile_tax", "kernels"))
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
        return cls(
            validation.text(f"{what}: backend", data.get("backend", ""), TopologyError),
            **found,
            tile_tax=read_taxes(f"{what}: tile_tax", data.get("tile_tax", {"1": 1.0})),
            kernels=parse_kernels(f"{what}: kernels", data.get("kernels", {})),
            source=validation.text(f"{what}: source", data.get("source", ""), TopologyError),
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


@dataclass(frozen=True, slots=True, eq=False)
class FusedWork:
    """A computation and the collective behind it, or many of them: numbers, or arrays of one shape.

    Args:
        seconds: Of the computation on one device, by the library.
        nbytes: Of the result that a rank computes: what it sends to all others where it keeps none.
        ranks: In a group, at least 2.
        reduces: Whether the collective is an all-reduce. Its addends have `nbytes`, its sums `sum_bytes`.
        sum_bytes: Bytes of the whole result of an all-reduce, on every rank; 0 of an all-to-all.
        kernel_seconds: Of the computation by the fused kernels, where it is not that of the library.
        addend_bytes: What the fused kernels send of a sum where `nbytes` are those of another dtype; 0 where not.
    """

    seconds: Numbers
    nbytes: Numbers
    ranks: int | Floats
    reduces: bool = False
    sum_bytes: Numbers = 0.0
    kernel_seconds: Numbers | None = None
    addend_bytes: Numbers = 0

    @property
    def sent_bytes(self) -> Numbers:
        """The bytes of a rank's result as the fused kernels send them."""
        return np.maximum(self.nbytes, self.addend_bytes)

    @property
    def busy(self) -> Numbers:
        """The seconds of the computation by the fused kernels, uncut."""
        return self.seconds if self.kernel_seconds is None else self.kernel_seconds

    @property
    def remote(self) -> Numbers:
        """The part of a rank's result that is for others, f."""
        return (self.ranks - 1) / self.ranks

    def result_seconds(self, constants: FusedConstants) -> Numbers:
        """Return the seconds in which a rank copies its result out of the transport's memory."""
        return (self.sum_bytes if self.reduces else self.nbytes) / constants.result_bandwidth

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
    return np.asarray(work.seconds + moved + work.gather(constants) + work.result_seconds(constants))


def fused_seconds(work: FusedWork, tiles: int, constants: FusedConstants) -> Floats:
    """Return the seconds with so many tiles a destination; of an all-reduce by two shots.

    >>> one = FusedConstants("x", latency=1e-6, bandwidth=1e9, copy_bandwidth=4e9, signal=0)
    >>> round(float(fused_seconds(FusedWork(1e-3, 2e6, 2), 4, one)) * 1e3, 3)
    1.126
    """
    wire = work.sent_bytes * work.remote / constants.bandwidth
    ends = work.gather(constants) + work.result_seconds(constants)
    return np.asarray(_overlap_seconds(work, wire, tiles, constants) + ends)


def one_shot_seconds(work: FusedWork, constants: FusedConstants) -> Floats:
    """Return the seconds of an all-reduce whose ranks send all addends to all, in one tile each, and add them up."""
    wire = work.sent_bytes * (work.ranks - 1) / constants.bandwidth
    # All ranks need the same addends: the first is sent when all are computed.
    sent = constants.latency + (work.ranks - 1) * constants.signal
    return np.asarray(work.busy + wire + sent + work.result_seconds(constants))


def _overlap_seconds(work: FusedWork, wire: Numbers, tiles: int, constants: FusedConstants) -> Floats:
    w, n = work.ranks, tiles
    busy = constants.tax(n * w) * work.busy
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


def decide(work: FusedWork, constants: FusedConstants) -> FusedDecision:
    """Return the fastest variant; a fused one only where it saves `LEAST_GAIN` of the unfused seconds or more.

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
    index = np.where(least <= (1 - LEAST_GAIN) * found[0], best, 0)
    return FusedDecision(ways, found, index)
