"""A redistribution problem and a peer's answer to it, as plain data, with the accounting that all peers share.

Source: the box rule and the table of received bytes of the specification of redistribution, sections 1, 2 and 4;
written again here from the text, independent of the package that is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

CHARGE_PER_ROUND = 0.002
"""The charge of one round, as a share of the memory bound (specification, section 4)."""

Kind = Literal["all-gather", "all-to-all", "permute", "slice"]


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of a mesh axis that cuts a dim: `size` chunks, below `major` chunks of the same axis.

    A whole axis of size n is `Factor(axis, 1, n)`; Shardy's `"x":(2)4` is `Factor("x", 2, 4)`.
    """

    axis: str
    major: int
    size: int

    @staticmethod
    def parse(text: str, sizes: dict[str, int]) -> Factor:
        """Read an axis of a mesh of these sizes, or a part of one."""
        axis, _, part = text.partition(":")
        major, size = part.strip("(").split(")") if part else (1, sizes[axis])
        return Factor(axis, int(major), int(size))


Cuts = tuple[tuple[Factor, ...], ...]
"""Per dim the factors that cut it, major first."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A sharded array and the sharding it shall get.

    `mesh` holds the ordered axes with their sizes (devices 0..N-1 row-major), `shape` the global shape, `itemsize` the
    bytes of an element, `src` and `dst` per dim the axes, major first; `x:(2)4` is a part of an axis, as in `Factor`.
    """

    mesh: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    itemsize: int
    src: tuple[tuple[str, ...], ...]
    dst: tuple[tuple[str, ...], ...]

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(size for _, size in self.mesh)

    @property
    def even(self) -> bool:
        """Whether every dim is divisible by the product of its axes, in source and destination."""
        sizes = dict(self.mesh)
        return all(
            n % math.prod(Factor.parse(axis, sizes).size for axis in axes) == 0
            for layout in (self.src, self.dst)
            for n, axes in zip(self.shape, layout, strict=True)
        )

    def cuts(self, layout: Sequence[Sequence[str]]) -> Cuts:
        """`layout` (per dim axes) as factors."""
        sizes = dict(self.mesh)
        return tuple(tuple(Factor.parse(axis, sizes) for axis in axes) for axes in layout)

    def to_json(self) -> dict[str, Any]:
        """The problem as lists, strings and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        """The problem that `to_json` wrote."""
        return cls(
            mesh=tuple((str(name), int(size)) for name, size in data["mesh"]),
            shape=tuple(data["shape"]),
            itemsize=data["itemsize"],
            src=tuple(tuple(axes) for axes in data["src"]),
            dst=tuple(tuple(axes) for axes in data["dst"]),
        )

    def __str__(self) -> str:
        def layout(dims: tuple[tuple[str, ...], ...]) -> str:
            parts = []
            for n, axes in zip(self.shape, dims, strict=True):
                names = axes[0] if len(axes) == 1 else f"({','.join(axes)})"
                parts.append(f"{n}@{names}" if axes else str(n))
            return f"[{', '.join(parts)}]"

        mesh = ",".join(f"{name}={size}" for name, size in self.mesh)
        return f"{{{mesh}}} {self.itemsize}B {layout(self.src)} -> {layout(self.dst)}"


@dataclass(frozen=True, slots=True)
class Moves:
    """What a peer does for a problem.

    `received` holds, per step, the bytes each device receives; `rounds` and `ops` one entry a step; `largest` is the
    largest local tensor in bytes, on the worst device, of inputs, intermediates and results. `rematerialised` is set
    by XLA only. `correct` is false when the peer failed or ended in another sharding, and `error` then says why
    (`received` may be empty). `seconds_planning` is the wall time of the peer's planning, or of compilation.
    """

    received: tuple[tuple[int, ...], ...]
    rounds: tuple[int, ...]
    largest: int
    ops: tuple[str, ...]
    rematerialised: bool = False
    correct: bool = True
    error: str = ""
    seconds_planning: float = 0.0

    def bytes_worst(self) -> int:
        """Bytes at the worst device of each step, summed over steps: the objective without its charge.

        The objective asks for the larger of sent and received. In every op of a peer, on even dims, what the worst
        device sends is what the worst receives: groups are symmetric, and a permute is one to one.
        """
        return sum(max(step, default=0) for step in self.received)

    def received_total_worst(self) -> int:
        """Bytes received over all steps by the device that receives most."""
        return max((sum(device) for device in zip(*self.received, strict=True)), default=0)

    def rounds_total(self) -> int:
        """Rounds, summed over steps."""
        return sum(self.rounds)

    def charged(self, bound: int) -> float:
        """The objective: `bytes_worst` and the charge of its rounds; `bound` is the problem's memory bound in bytes."""
        return self.bytes_worst() + CHARGE_PER_ROUND * bound * self.rounds_total()

    def to_json(self) -> dict[str, Any]:
        """The moves as lists, strings and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Moves:
        """The moves that `to_json` wrote."""
        fields = dict(data)
        fields["received"] = tuple(tuple(step) for step in data["received"])
        fields["rounds"] = tuple(data["rounds"])
        fields["ops"] = tuple(data["ops"])
        return cls(**fields)

    @classmethod
    def failed(cls, error: str, seconds: float = 0.0) -> Moves:
        """The answer of a peer that refused the problem or broke on it."""
        return cls((), (), 0, (), correct=False, error=error, seconds_planning=seconds)


@dataclass(frozen=True, slots=True)
class Step:
    """One op of a peer's plan: its kind, the devices in one group (`q`), the layout after it, and a short text."""

    kind: Kind
    q: int
    after: Cuts
    text: str


def rounds_of(kind: str, q: int, moved: bool) -> int:
    """The rounds of a step over groups of `q` devices; `moved` says whether any device receives anything.

    A permute takes 1, a gather or a reduction ceil(log2 q), an all-to-all q - 1; a step that moves nothing takes 0.
    """
    if not moved or kind == "slice":
        return 0
    if kind == "permute":
        return 1
    if kind == "all-to-all":
        return q - 1
    return (q - 1).bit_length()


def boxes(problem: Problem, cuts: Cuts) -> tuple[np.ndarray, np.ndarray]:
    """First index and end of every device's part per dim, two int arrays (devices, ndim), by nested ceilings."""
    sizes = [size for _, size in problem.mesh]
    names = [name for name, _ in problem.mesh]
    coordinates = np.unravel_index(np.arange(problem.devices), sizes) if sizes else ()
    low = np.zeros((problem.devices, len(problem.shape)), dtype=np.int64)
    high = np.broadcast_to(np.array(problem.shape, dtype=np.int64), low.shape).copy()
    for dim, factors in enumerate(cuts):
        for factor in factors:
            place = names.index(factor.axis)
            minor = sizes[place] // (factor.major * factor.size)
            digit = (coordinates[place] // minor) % factor.size
            chunk = -(-(high[:, dim] - low[:, dim]) // factor.size)
            start = np.minimum(low[:, dim] + digit * chunk, high[:, dim])
            high[:, dim] = np.minimum(start + chunk, high[:, dim])
            low[:, dim] = start
    return low, high


def local_bytes(problem: Problem, cuts: Cuts) -> np.ndarray:
    """The bytes each device holds in a layout, (devices,)."""
    low, high = boxes(problem, cuts)
    return (high - low).prod(axis=1) * problem.itemsize


def missing_bytes(problem: Problem, before: Cuts, after: Cuts) -> np.ndarray:
    """The bytes of each device's part in `after` that it does not hold in `before`, (devices,)."""
    low0, high0 = boxes(problem, before)
    low1, high1 = boxes(problem, after)
    shared = np.maximum(np.minimum(high0, high1) - np.maximum(low0, low1), 0).prod(axis=1)
    return ((high1 - low1).prod(axis=1) - shared) * problem.itemsize


def same_boxes(problem: Problem, one: Cuts, other: Cuts) -> bool:
    """Whether every device holds the same part in both layouts (all empty parts are equal)."""
    return not missing_bytes(problem, one, other).any() and not missing_bytes(problem, other, one).any()


def memory_bound(problem: Problem) -> int:
    """The largest local part of source or destination, in bytes: `bound_bytes`."""
    ends = (problem.cuts(problem.src), problem.cuts(problem.dst))
    return max(int(local_bytes(problem, cuts).max()) for cuts in ends)


def lower_bound(problem: Problem) -> int:
    """The bytes that the worst device must receive: its destination part minus what it holds."""
    return int(missing_bytes(problem, problem.cuts(problem.src), problem.cuts(problem.dst)).max())


def replay(problem: Problem, steps: Sequence[Step], seconds: float = 0.0) -> Moves:
    """The bytes of a plan given as layouts, and whether it ends in the asked sharding.

    A gather or an all-to-all delivers what a device lacks, which on even dims is L(q-1) and L(1-1/q); a permute
    delivers the whole part where it changes. A slice that would need data the device lacks makes the plan incorrect.
    """
    now = problem.cuts(problem.src)
    largest = int(local_bytes(problem, now).max())
    received: list[tuple[int, ...]] = []
    rounds: list[int] = []
    error = ""
    for step in steps:
        lacking = missing_bytes(problem, now, step.after)
        size = local_bytes(problem, step.after)
        if step.kind == "permute":
            lacking = np.where(lacking > 0, size, 0)
        elif step.kind == "slice" and lacking.any():
            error = error or f"{step.text} needs data that the device does not hold"
        received.append(tuple(int(x) for x in lacking))
        rounds.append(rounds_of(step.kind, step.q, bool(lacking.any())))
        largest = max(largest, int(size.max()))
        now = step.after
    asked = problem.cuts(problem.dst)
    if not error and not same_boxes(problem, now, asked):
        error = f"ends in {_text(problem, now)}, asked was {_text(problem, asked)}"
    ops = tuple(step.text for step in steps)
    return Moves(tuple(received), tuple(rounds), largest, ops, correct=not error, error=error, seconds_planning=seconds)


def _text(problem: Problem, cuts: Cuts) -> str:
    sizes = dict(problem.mesh)

    def name(factor: Factor) -> str:
        whole = factor.size == sizes[factor.axis]
        return factor.axis if whole else f"{factor.axis}:({factor.major}){factor.size}"

    dims = zip(problem.shape, cuts, strict=True)
    return "[" + ", ".join(f"{n}@({','.join(map(name, fs))})" if fs else str(n) for n, fs in dims) + "]"
