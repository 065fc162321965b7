"""Probe: a table beside what the framework's own loader makes of a checkpoint whose elements carry their index.

The proof of coverage cannot see a table that swaps two tensors of one shape. So a table is tested with the loader that
it describes: on a tiny model every element of the checkpoint has a number, its digits in base 256 are loaded one after
the other (whole numbers up to 255 are exact in bf16, f16 and f32), and where each element went is read off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardplan.errors import LayoutError
from shardplan.movement.weights.drops import left_out
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.weights import Weights

BASE = 256
Named = Mapping[str, np.ndarray]
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class ProbeDifference:
    """The first element of a parameter where loader and table differ: what each of them has there, as text."""

    rank: int
    name: str
    index: tuple[int, ...]
    loaded: str
    said: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.name}{list(self.index)} of rank {self.rank} is {self.loaded}, and the table says {self.said}"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found: how many parameters and elements were compared, and where they differ, one a parameter."""

    parameters: int
    elements: int
    differences: tuple[ProbeDifference, ...]

    def require(self) -> None:
        """Raise `LayoutError` with the first differences, where there are any."""
        if self.differences:
            some = "; ".join(map(str, self.differences[:_SHOWN]))
            raise LayoutError(
                f"{len(self.differences)} of {self.parameters} parameters differ from the loader's: {some}"
            )


def probe(source: Weights, load: Callable[[Named], Mapping[int, Named]], target: Weights) -> ProbeResult:
    """Compare a table with a framework's own loader.

    Args:
        source: what the loader reads, whole, on one device: a checkpoint on disk.
        load: loads tensors by name (f32, whole numbers from 0 to 255) and returns, for each rank of the target, the
            parameters that it then has by name, as arrays. It is called once a digit.
        target: the table under test, at the degrees of the loader's ranks.

    Returns:
        What was compared and what differs: tensors that are swapped, joined in another order, or cut elsewhere.

    Raises:
        LayoutError: a source of several devices, or parameters that are missing, additional or misshapen.
    """
    numbers, total = number_elements(source)
    (rank,) = source.devices
    sides = widen_dtypes(source), widen_dtypes(target)
    plan = refit(*sides, drop=[left.tensor for left in left_out(*sides)])  # a loader need not take all
    found = digits_loaded(source, load, target.devices, target.check)
    said: dict[int, dict[str, np.ndarray]] = {}
    for unit, digit in _digits(numbers, total):
        for r, named in plan.apply({rank: digit}).items():
            _add(said.setdefault(r, {}), named, unit)
    return _compare_loaded(target, found, said, numbers)


def number_elements(source: Weights) -> tuple[dict[str, np.ndarray], int]:
    """Return a number for every element of a checkpoint, by name, from 1 on, and one more than the largest.

    0 is what is not loaded: padding. Raises `LayoutError` for a source of several devices.
    """
    if len(source.devices) != 1:
        raise LayoutError(f"a probe loads from {len(source.devices)} devices; legal is a checkpoint on one")
    (rank,) = source.devices
    out: dict[str, np.ndarray] = {}
    total = 1
    for name, shape, _ in source.parameters(rank):
        size = int(np.prod(shape, dtype=np.int64))
        out[name] = np.arange(total, total + size, dtype=np.int64).reshape(shape)
        total += size
    return out, total


def digits_loaded(
    source: Weights,
    load: Callable[[Named], Mapping[int, Named]],
    ranks: Iterable[int],
    check: Callable[[Named, int], None] | None = None,
) -> dict[int, dict[str, np.ndarray]]:
    """Return the number of every element that every rank has by name, int64, by loading one digit after the other.

    Raises `LayoutError` for ranks of which the loader gave nothing, and what `check` raises.
    """
    numbers, total = number_elements(source)
    ranks = list(ranks)
    out: dict[int, dict[str, np.ndarray]] = {r: {} for r in ranks}
    for unit, digit in _digits(numbers, total):
        made = load(digit)
        for r in ranks:
            if r not in made:
                raise LayoutError(f"the loader gave nothing for rank {r}; legal are {ranks}")
            if check is not None:
                check(made[r], r)
            _add(out[r], made[r], unit)
    return out


def _digits(numbers: Mapping[str, np.ndarray], total: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    unit = 1
    while unit < total:
        yield unit, {name: (n // unit % BASE).astype(np.float32) for name, n in numbers.items()}
        unit *= BASE


def widen_dtypes(side: Weights, dtype: str = "f32") -> Weights:
    """Return a side with every element in a dtype that holds what is loaded: f8 would round a digit."""
    entries = tuple(replace(p, dtype="") for p in side.table.parameters)
    table = replace(side.table, dtypes=(), parameters=entries)
    return Weights(table, side.config, side.given, side.devices, dtype)


def _add(into: dict[str, np.ndarray], made: Named, unit: int) -> None:
    for name, array in made.items():
        values = np.asarray(array).astype(np.float64).round().astype(np.int64) * unit
        into[name] = into[name] + values if name in into else values


def _compare_loaded(
    target: Weights,
    found: dict[int, dict[str, np.ndarray]],
    said: dict[int, dict[str, np.ndarray]],
    origins: Mapping[str, np.ndarray],
) -> ProbeResult:
    differences: list[ProbeDifference] = []
    parameters = elements = 0
    for rank in target.devices:
        for name, wanted in said[rank].items():
            parameters, elements = parameters + 1, elements + wanted.size
            wrong = np.flatnonzero((found[rank][name] != wanted).reshape(-1))
            if len(wrong):
                at = int(wrong[0])
                place = tuple(int(i) for i in np.unravel_index(at, wanted.shape))
                a, b = (origin(int(x.reshape(-1)[at]), origins) for x in (found[rank][name], wanted))
                differences.append(ProbeDifference(rank, name, place, a, b))
    return ProbeResult(parameters, elements, tuple(differences))


def origin(number: int, numbers: Mapping[str, np.ndarray]) -> str:
    """Return which element of a checkpoint has a number, as text."""
    if number < 1:
        return "padding"
    for name, own in numbers.items():
        if own.size and own.flat[0] <= number <= own.flat[-1]:
            return f"{name}{[int(i) for i in np.unravel_index(number - int(own.flat[0]), own.shape)]}"
    return f"no element of the checkpoint ({number})"
