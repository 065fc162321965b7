"""Fitting a library's table to samples: the constants whose prices come nearest to what was measured.

A row's price is a sum of terms, each a coefficient of the sample times constants of the table:

    seconds = fixed + base + near * N + far * F + own_copy * O / near_share + max(L / near_share, M / far_share)

A system that is not known has two constants of its own, which belong to a topology: the latency of its fabric, which
every far hop takes beside `far`, and the efficiency of its NICs, which divides M. Both start at the default's.

Coefficients are read off `price` itself, by pricing every row with constants of 0 and 1, so that a fit cannot disagree
with the price. Numbers alike under one key of a table are one constant; a number at its default (0, or 1 of `near` and
the shares) is none. Constants are positive and fitted as logarithms, by the steps of Levenberg and Marquardt on the
Huber loss of log(price / measured), with a weak pull to where they started: what the samples say nothing of stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from shardplan.core.pattern import Pattern
from shardplan.errors import TopologyError
from shardplan.hardware.measured.sample_setup import (
    System,
    pattern_of_sample,
    systems,
    topology_of_sample,
    unknown_systems,
)
from shardplan.hardware.measured.samples import Sample
from shardplan.hardware.prices.cost import Price, price
from shardplan.hardware.prices.fabric import Fabric, Floats, Ints
from shardplan.hardware.prices.library import Library, LibraryRow

_KEYS = ("base", "base_far", "near", "far", "near_share", "far_share")
_DEFAULTS = {field.name: field.default for field in fields(LibraryRow)}
_BEND = 0.1  # relative error from which on the loss grows no faster than the error
_PULL = 0.002  # of a constant to its start, against 1 of a curve's decade of bytes
_STEPS = 200
_OFF = 1e30  # a share so large that its load takes no time


@dataclass(frozen=True, slots=True)
class FittedLibrary:
    """A table with its constants fitted, and what is known of how good it is."""

    table: Library  # fitted on all samples
    rows: int  # samples that it was fitted on
    constants: int  # of the table, those that the samples determine
    held_out: int  # samples of curves held out by hash
    before: float  # median error of the samples held out, in percent, under the table given
    after: float  # the same under a table fitted on the other samples
    undetermined: tuple[str, ...]  # constants that no price of a sample depends on, kept as they were
    systems: tuple[tuple[str, System], ...] = ()  # of systems that are not known their names and fabrics, fitted too


def fit(table: Library, samples: Sequence[Sample]) -> FittedLibrary:
    """Return a table whose constants are fitted to samples of its library.

    A third of the curves (GPU, op, one or several nodes, system) is held out by hash to judge by; the table returned is
    fitted on all. Raises `TopologyError` where a sample has no price.
    """
    constants = _Constants.of(table, unknown_systems(samples))
    terms = _Terms.of(table, samples, constants.systems)
    start = np.log(constants.values)
    seconds = np.array([sample.seconds for sample in samples])
    weights = _weights(samples)
    held = np.array([sample.held_out for sample in samples], dtype=bool)
    judged = bool(held.any()) and not bool(held.all())
    rest = _solve(terms, constants, start, seconds, weights * ~held) if judged else start
    found = _solve(terms, constants, start, seconds, weights)
    moves = np.abs(terms.prices(constants, found)[1]).max(axis=0) > 0
    values = np.where(moves, np.exp(found), constants.values)
    before, after = (
        float(np.median(np.abs(terms.prices(constants, at)[0] / seconds - 1)[held])) * 100 if judged else 0.0
        for at in (start, rest)
    )
    kept = tuple(name for name, moved in zip(constants.names, moves, strict=True) if not moved)
    fitted, fabrics = constants.fill_table(table, values), constants.fabrics(values)
    return FittedLibrary(fitted, len(samples), int(moves.sum()), int(held.sum()) * judged, before, after, kept, fabrics)


def _weights(samples: Sequence[Sample]) -> Floats:
    """Every curve's decade of bytes weighs 1, so that no long curve rules."""
    keys = [(sample.curve, len(str(sample.nbytes))) for sample in samples]
    count = Counter(keys)
    return np.array([1 / count[key] for key in keys])


@dataclass(frozen=True, slots=True, eq=False)
class _Constants:
    """The constants of a table, then latency and efficiency of every unknown system: values, and where each stands."""

    names: tuple[str, ...]  # of the first place of each
    values: Floats
    slot: Ints  # the number of the constant of every row and key, -1 where there is none [rows, keys]
    given: Floats  # the numbers as they stand, 0 for None [rows, keys]
    own_copy: int  # the number of the table's own_copy, -1 where it is 0
    systems: tuple[str, ...]  # unknown ones, whose constants are the last

    @classmethod
    def of(cls, table: Library, unknown: Sequence[str]) -> _Constants:
        """Number the constants of a table, and of systems that are not known."""
        numbers: dict[tuple[str, float], int] = {}
        names: list[str] = []

        def number(key: str, value: float | None, name: str) -> int:
            if not value or value == _DEFAULTS.get(key):
                return -1
            if (key, value) not in numbers:
                numbers[key, value] = len(names)
                names.append(name)
            return numbers[key, value]

        slot = [[number(key, getattr(row, key), f"{key} of {row.name}") for key in _KEYS] for row in table.rows]
        own = number("own_copy", table.own_copy, "own_copy")
        given = [[getattr(row, key) or 0.0 for key in _KEYS] for row in table.rows]
        names += [f"{what} of {system}" for system in unknown for what in System._fields]
        values = [*(v for _, v in numbers), *(x for _ in unknown for x in systems()["default"])]
        return cls(tuple(names), np.array(values), np.array(slot), np.array(given), own, tuple(unknown))

    def fabrics(self, values: Floats) -> tuple[tuple[str, System], ...]:
        """Return the fabrics of the systems that are not known; no NIC delivers more than its rate."""
        pairs = values[len(values) - 2 * len(self.systems) :].reshape(-1, 2).tolist()
        return tuple((name, System(a, min(b, 1.0))) for name, (a, b) in zip(self.systems, pairs, strict=True))

    def row_numbers(self, logs: Floats) -> Floats:
        """Return every row's numbers under constants given as logarithms, [rows, keys]."""
        return np.where(self.slot < 0, self.given, np.exp(np.append(logs, 0.0))[self.slot])

    def fill_table(self, table: Library, values: Floats) -> Library:
        """Return a table with other values of the constants."""
        rows: list[LibraryRow] = []
        for row, slots in zip(table.rows, self.slot.tolist(), strict=True):
            numbers = {key: float(values[n]) for key, n in zip(_KEYS, slots, strict=True) if n >= 0}
            rows.append(replace(row, **numbers))
        return replace(table, rows=tuple(rows), own_copy=float(values[self.own_copy]) if self.own_copy >= 0 else 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Terms:
    """The coefficients of samples under the rows of a table; all [samples, rows], but the last two [samples]."""

    fixed: Floats  # seconds whatever the constants; infinite where a row does not serve a sample
    far: Floats  # 1 where several nodes take part, else 0
    near_hops: Floats
    far_hops: Floats
    own: Floats
    near_load: Floats
    far_load: Floats
    system: Ints  # the number of its unknown system, -1 where there is none
    default: System  # what unknown systems are priced by

    @classmethod
    def of(cls, table: Library, samples: Sequence[Sample], unknown: Sequence[str]) -> _Terms:
        """Price every sample under every row with constants of 0 and 1."""
        found = np.full((7, len(samples), len(table.rows)), np.inf)
        for s, sample in enumerate(samples):
            topology = replace(topology_of_sample(sample), library="ring")
            pattern, fabric = pattern_of_sample(sample, topology), Fabric(topology)
            for r, row in enumerate(table.rows):
                try:
                    alone = replace(table, rows=(row,), own_copy=float(not sample.in_place))
                    found[:, s, r] = _coefficients(alone, pattern, fabric)
                except TopologyError:  # the row does not serve these groups
                    continue
        unserved = np.isinf(found[0]).all(axis=1)
        if unserved.any():
            raise TopologyError(f"library {table.name} has no row for sample {samples[int(unserved.argmax())].id!r}")
        found[1:] = np.where(np.isinf(found[0]), 0.0, found[1:])
        numbers = {name: n for n, name in enumerate(unknown)}
        system = np.array([numbers.get(sample.system, -1) if sample.nodes > 1 else -1 for sample in samples])
        return cls(*found, system=system, default=systems()["default"])

    def prices(self, constants: _Constants, logs: Floats) -> tuple[Floats, Floats]:
        """Return the price of every sample, and how its logarithm grows with each constant's, [samples, constants]."""
        base, base_far, near, far, near_share, far_share = constants.row_numbers(logs).T
        own_copy = float(np.exp(logs[constants.own_copy])) if constants.own_copy >= 0 else 0.0
        once, own = np.where(self.far > 0, base_far, base), self.own * own_copy / near_share
        # A fabric of its own takes the default's place.
        new = (self.system >= 0)[:, None]
        fabrics = np.exp(logs[len(logs) - 2 * len(constants.systems) :]).reshape(-1, 2)
        latency, efficiency = np.append(fabrics, [self.default], axis=0)[self.system].T[:, :, None]
        waits = np.where(new, self.far_hops * latency, 0.0)
        fixed = self.fixed - np.where(new, self.far_hops * self.default.latency, 0.0)
        near_load, far_load = self.near_load / near_share, self.far_load / far_share
        far_load = np.where(new, far_load * self.default.efficiency / efficiency, far_load)
        hops = self.near_hops * near, self.far_hops * far
        total = fixed + waits + once + sum(hops) + own + np.maximum(near_load, far_load)
        paid = np.arange(len(total)), total.argmin(axis=1)
        # A price grows with the logarithm of a constant by the constant's own term, and shrinks with a share's.
        parts = [once * (self.far == 0), once * (self.far > 0), *hops]
        parts += [-own - near_load * (near_load >= far_load), -far_load * (near_load < far_load)]
        grown = np.zeros((len(total), len(logs) + 1))  # the last column takes what is no constant
        for part, slot in zip(parts, constants.slot.T, strict=True):
            np.add.at(grown, (paid[0], slot[paid[1]]), part[paid])
        grown[:, constants.own_copy] += own[paid]
        mine = np.flatnonzero(new)
        first = len(logs) - 2 * len(constants.systems) + 2 * self.system[mine]
        grown[mine, first] += waits[paid][mine]
        grown[mine, first + 1] -= (far_load * (near_load < far_load))[paid][mine]
        seconds = total[paid]
        return seconds, grown[:, :-1] / seconds[:, None]


def _coefficients(table: Library, pattern: Pattern, fabric: Fabric) -> tuple[float, ...]:
    """The fields of `_Terms` of one pattern, under the one row of a table."""
    row = table.rows[0]
    served = {key: 0.0 for key in ("base", "base_far") if getattr(row, key) is not None}
    found: list[Price] = []
    for near, far, near_share, far_share in ((0.0, 0.0, 1.0, _OFF), (1.0, 0.0, _OFF, 1.0), (0.0, 1.0, 1.0, 1.0)):
        numbers = {"near": near, "far": far, "near_share": near_share, "far_share": far_share}
        found.append(price(pattern, fabric.with_library(replace(table, rows=(replace(row, **served, **numbers),)))))
    bare, over_near, over_far = found
    hops = over_near.alpha - bare.alpha, over_far.alpha - bare.alpha
    loads = bare.transfer - bare.own, over_near.transfer - over_near.own
    return bare.alpha, float(hops[1] > 0), *hops, bare.own, *loads


def _solve(terms: _Terms, constants: _Constants, start: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Return the logarithms of the constants of the least loss, from a start."""

    def loss(logs: Floats) -> tuple[float, Floats, Floats]:
        found, grown = terms.prices(constants, logs)
        error = np.log(found / seconds)
        size = np.abs(error)
        huber = np.where(size < _BEND, error**2 / 2, _BEND * (size - _BEND / 2))
        return float(weights @ huber + _PULL / 2 * ((logs - start) ** 2).sum()), error, grown

    logs = start
    least, error, grown = loss(logs)
    damping = 1e-2
    for _ in range(_STEPS):
        trusted = weights * np.minimum(1, _BEND / np.maximum(np.abs(error), 1e-12))
        matrix = grown.T @ (grown * trusted[:, None]) + _PULL * np.eye(len(logs))
        slope = grown.T @ (error * trusted) + _PULL * (logs - start)
        step = np.clip(np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -slope), -0.5, 0.5)
        tried = loss(logs + step)
        if tried[0] < least:
            gained = least - tried[0]
            logs, (least, error, grown), damping = logs + step, tried, max(damping / 6, 1e-6)
            if gained < 1e-6 * least:
                break
        elif damping > 1e8:
            break
        else:
            damping *= 4
    return logs
