"""Probe: a table beside what the framework's own loader makes of a checkpoint whose elements carry their index.

The proof of coverage cannot see a table that swaps two tensors of one shape. So a table is tested with the loader that
it describes: on a tiny model every element of the checkpoint has a number, its digits in base 256 are loaded one after
the other (whole numbers up to 255 are exact in bf16, f16 and f32), and where each element went is read off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from shardplan.errors import LayoutError
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
    if len(source.devices) != 1:
        raise LayoutError(f"a probe loads from {len(source.devices)} devices; legal is a checkpoint on one")
    (rank,) = source.devices
    legal = source.parameters(rank)
    starts: list[int] = []
    total = 1  # 0 is what is not loaded: padding
    for _, shape, _ in legal:
        starts.append(total)
        total += int(np.prod(shape, dtype=np.int64))
    plan = refit(source, target)
    numbers = {
        n: np.arange(s, s + int(np.prod(shape)), dtype=np.int64) for (n, shape, _), s in zip(legal, starts, strict=True)
    }
    found: dict[int, dict[str, np.ndarray]] = {}
    said: dict[int, dict[str, np.ndarray]] = {}
    unit = 1
    while unit < total:
        digit = {n: (numbers[n] // unit % BASE).astype(np.float32).reshape(shape) for n, shape, _ in legal}
        for into, made in ((found, load(digit)), (said, plan.apply({rank: digit}))):
            for r in target.devices:
                if r not in made:
                    raise LayoutError(f"the loader gave nothing for rank {r}; legal are {list(target.devices)}")
                if into is found:
                    target.check(made[r], r)
                _add(into.setdefault(r, {}), made[r], unit, target, r)
        unit *= BASE
    return _compared(target, found, said, ([n for n, _, _ in legal], starts, [s for _, s, _ in legal]))


def _add(into: dict[str, np.ndarray], made: Named, unit: int, target: Weights, rank: int) -> None:
    for name in target.names(rank):
        values = np.asarray(made[name]).astype(np.float64).round().astype(np.int64) * unit
        into[name] = into[name] + values if name in into else values


Origins = tuple[list[str], list[int], list[tuple[int, ...]]]


def _compared(
    target: Weights, found: dict[int, dict[str, np.ndarray]], said: dict[int, dict[str, np.ndarray]], origins: Origins
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
                a, b = (_origin(int(x.reshape(-1)[at]), origins) for x in (found[rank][name], wanted))
                differences.append(ProbeDifference(rank, name, place, a, b))
    return ProbeResult(parameters, elements, tuple(differences))


def _origin(number: int, origins: Origins) -> str:
    """Which element of the checkpoint has a number, as text."""
    names, starts, shapes = origins
    if number < 1:
        return "padding"
    k = int(np.searchsorted(starts, number, side="right")) - 1
    at = number - starts[k]
    if at >= int(np.prod(shapes[k], dtype=np.int64)):
        return f"no element of the checkpoint ({number})"
    return f"{names[k]}{[int(i) for i in np.unravel_index(at, shapes[k])]}"
