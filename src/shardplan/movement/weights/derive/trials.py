"""One run of a loader at some sizes and degrees, and which logical element stands at every place of what it made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from shardplan.errors import LayoutError
from shardplan.movement.weights.form import StoredForm
from shardplan.movement.weights.probe import Named, digits_loaded, number_elements, widen_dtypes
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.table import TableParameter
from shardplan.movement.weights.weights import Weights, make_weights


@dataclass(frozen=True, slots=True)
class LoaderTrial:
    """A run of a loader: `source` is what it reads, whole, on one device; `mesh` its ranks, axes major first, sizes.

    `load` is as of `probe`: tensors by name in, and for each rank what it then has. `meshes` are further meshes on the
    same ranks, by name: experts often have their own.
    """

    source: Weights
    load: Callable[[Named], Mapping[int, Named]]
    mesh: Mapping[str, int] = field(default_factory=dict[str, int])
    meshes: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(self.mesh.values())

    def axes(self, mesh: str) -> Mapping[str, int]:
        """Return the axes of a mesh, with sizes."""
        return self.meshes[mesh] if mesh else self.mesh

    def mesh_coordinate(self, rank: int, mesh: str) -> dict[str, int]:
        """Return a rank's coordinate on a mesh."""
        axes = self.axes(mesh)
        found = np.unravel_index(rank, tuple(axes.values())) if axes else ()
        return {a: int(i) for a, i in zip(axes, found, strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class SeenArray:
    """A loaded parameter: the number of the tensor at every place (-1: padding), and the flat logical index there."""

    tensor: np.ndarray
    index: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class SeenTrial:
    """A trial, and what every rank has, by name."""

    trial: LoaderTrial
    tensors: tuple[str, ...]
    held: tuple[Mapping[str, SeenArray], ...]
    numbers: tuple[Mapping[str, np.ndarray], ...]

    def shape(self, tensor: int) -> tuple[int, ...]:
        """Return the sizes of a logical tensor."""
        return self.trial.source.tensors[self.tensors[tensor]].sizes


def run_trial(trial: LoaderTrial) -> SeenTrial:
    """Run a loader on digits of the elements' numbers, and read off where each element went.

    Raises `LayoutError` for a source of several devices, ranks that are missing, and values that are no element.
    """
    source = trial.source
    numbers, total = number_elements(source)
    tensor_of, index_of = np.full(total, -1, dtype=np.int64), np.zeros(total, dtype=np.int64)
    tensors = tuple(source.tensors)
    for k, tensor in enumerate(tensors):
        for at, found in _logical(source, tensor, numbers):
            tensor_of[found], index_of[found] = k, at
    loaded = digits_loaded(source, trial.load, range(trial.ranks))
    held: list[dict[str, SeenArray]] = []
    for rank in range(trial.ranks):
        own: dict[str, SeenArray] = {}
        for name, array in loaded[rank].items():
            if array.size and (array.min() < 0 or array.max() >= total):
                wrong = int(array.reshape(-1)[np.flatnonzero((array < 0) | (array >= total))[0]])
                raise LayoutError(f"{name} of rank {rank} has {wrong}, no element of the checkpoint; legal is a copy")
            own[name] = SeenArray(tensor_of[array], index_of[array])
        held.append(own)
    return SeenTrial(trial, tensors, tuple(held), tuple(loaded[r] for r in range(trial.ranks)))


def _logical(source: Weights, tensor: str, numbers: Named) -> list[tuple[np.ndarray, np.ndarray]]:
    """The flat logical indices of a tensor, and the number of the element that stands at each."""
    found = source.tensors[tensor]
    holes = dict(source.table.holes)
    named = [len(d.atoms) == 1 and d.atoms[0] in holes for d in found.dims]
    memory = [" ".join(d.atoms) or "1" for d, hole in zip(found.dims, named, strict=True) if not hole]
    name = "/".join(["x", *(f"{{{d.atoms[0]}}}" for d, hole in zip(found.dims, named, strict=True) if hole)])
    entry = TableParameter(name, StoredForm.parse(f"{tensor} = {', '.join(memory or ['1'])}"))
    whole = tuple((d.atoms[0], d.atoms[0]) for d, hole in zip(found.dims, named, strict=True) if hole)
    table = replace(source.table, meshes=(("", ()),), numbers=(), split=(), holes=whole, parameters=(entry,), dtypes=())
    (rank,) = source.devices
    target = make_weights(table, dict(source.config), {}, [rank], "f64")
    wide = {n: a.astype(np.float64) for n, a in numbers.items()}
    out: list[tuple[np.ndarray, np.ndarray]] = []
    for given, array in refit(widen_dtypes(source, "f64"), target, only=tensor).apply({rank: wide})[rank].items():
        values = iter(map(int, given.split("/")[1:]))
        ranges = [
            np.array([next(values)]) if hole else np.arange(n)
            for n, hole in zip(found.sizes, named, strict=True)
        ]  # fmt: skip
        at = np.ravel_multi_index(np.ix_(*ranges), found.sizes) if ranges else np.zeros(1, dtype=np.int64)
        out.append((at.reshape(-1), array.astype(np.int64).reshape(-1)))
    return out
