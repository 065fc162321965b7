"""What a stored parameter holds, element by element: expressions read as lists of labelled elements, cut with slices.

This is the meaning that lowering to runs must equal. It uses the parsed form only, and nothing of how it is lowered.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from shardplan.movement.weights.form import FormFactor, axes_of, parse_product, walk_factors
from shardplan.movement.weights.weights import Weights

Label = tuple[str | None, bool, dict[str, int]]  # tensor, padding, digits


def parts(items: list[Any], rule: str, p: int, tables: dict[str, Any]) -> list[list[Any]]:
    """Every owner's part of a list."""
    n = len(items)
    if rule in tables:
        table = tables[rule]
        if isinstance(table[0], int):
            ends = list(itertools.accumulate(table))
            return [items[e - c : e] for c, e in zip(table, ends, strict=True)]
        return [[items[i] for i in row] for row in table]
    if rule == "ceil":
        size = -(-n // p)
        return [items[k * size : (k + 1) * size] for k in range(p)]
    if rule == "first":
        return [list(a) for a in _split(items, [n // p + (k < n % p) for k in range(p)])]
    if rule == "last":
        return [list(a) for a in _split(items, [n // p + (k >= p - n % p) for k in range(p)])]
    if rule == "robin":
        return [items[k::p] for k in range(p)]
    if n % p:
        assert rule == "shared" and p % n == 0
        return [[items[k // (p // n)]] for k in range(p)]
    return [items[k * (n // p) : (k + 1) * (n // p)] for k in range(p)]


def _split(items: list[Any], sizes: list[int]) -> list[list[Any]]:
    return [items[e - s : e] for s, e in zip(sizes, itertools.accumulate(sizes), strict=True)]


class Oracle:
    """One side, element by element."""

    def __init__(self, weights: Weights) -> None:
        self.w = weights
        self.sizes = weights.sizing
        self.tables = {k: v for k, v in weights.given if not isinstance(v, int)}

    def size(self, atom: str) -> int:
        return int(atom) if atom.isdigit() else self.sizes.size(atom)

    def labels(self, factors: tuple[FormFactor, ...], at: dict[str, int], axes: dict[str, int]) -> list[Label]:
        """The elements of a product that a device holds, in order."""
        out: list[Label] = [(None, False, {})]
        for factor in factors:
            if isinstance(factor.item, str):
                own: list[Label] = [(None, False, {factor.item: i}) for i in range(self.size(factor.item))]
            else:
                own = []
                for alternative in factor.item:
                    if alternative.padding is not None:
                        own += [(None, True, {})] * self.size(alternative.padding)
                    else:
                        inner = self.labels(alternative.factors, at, axes)
                        own += [(t or alternative.tensor, pad, d) for t, pad, d in inner]
            for cut in factor.cuts:
                number, count = 0, 1
                for axis in cut.axes:
                    number, count = number * axes[axis] + at[axis], count * axes[axis]
                own = parts(own, cut.rule, count, self.tables)[number]
            out = [(t or u, p or q, d | e) for t, p, d in out for u, q, e in own]
        return out

    def value(self, atom: str, digits: dict[str, int]) -> int | None:
        """The value of an atom from digits, None where they do not say it."""
        if atom in digits:
            return digits[atom]
        split = dict(self.w.table.split).get(atom)
        if split is None or atom in split.split():
            return None
        value = 0
        for inner in split.split():
            found = self.value(inner, digits)
            if found is None:
                return None
            value = value * self.size(inner) + found
        return value

    def parameters(self, rank: int) -> dict[str, tuple[tuple[int, ...], dict[str, np.ndarray]]]:
        """Of every parameter of a rank: its shape, and per tensor the flat logical index of every element, or -1."""
        out: dict[str, tuple[tuple[int, ...], dict[str, np.ndarray]]] = {}
        place = self.w.devices.index(rank)
        numbers = self.sizes.numbers
        for entry in self.w.table.parameters:
            if not self.sizes.has(entry):
                continue
            axes = self.sizes.meshes[entry.mesh]
            at = dict(zip(axes, np.unravel_index(place, tuple(axes.values())) if axes else (), strict=True))
            at = {k: int(v) for k, v in at.items()}
            chosen = {k: {"first": 0, "last": -1}[v] if isinstance(v, str) else v for k, v in entry.on}
            full = axes | numbers
            chosen = {k: v % full.get(k, 10**9) if v >= 0 else full.get(k, 0) - 1 for k, v in chosen.items()}
            if any(at[k] != v for k, v in chosen.items() if k in at):
                continue
            dims = [self.labels(d, at, axes) for d in entry.form.dims]
            tensors = {t: self.sizes.tensor(t) for t in entry.form.tensors}
            stored = {f.item for d in entry.form.dims for f in walk_factors(d) if isinstance(f.item, str)}
            first = next(iter(tensors.values()))
            open_atoms = [
                a for d in first.dims for a in d.atoms
                if self.value(a, dict.fromkeys(stored, 0)) is None and a in dict(self.w.table.holes)
            ]  # fmt: skip
            holes: list[list[tuple[dict[str, int], dict[str, int]]]] = []
            for atom in open_atoms:
                factors = parse_product(dict(self.w.table.holes)[atom])
                mine = [a for a in axes_of(factors) if a in numbers]
                rows: list[tuple[dict[str, int], dict[str, int]]] = []
                for values in itertools.product(*(range(numbers[a]) for a in mine)):
                    own = dict(zip(mine, values, strict=True))
                    for local, (_, _, digits) in enumerate(self.labels(factors, at | own, full)):
                        rows.append((digits, own | digits | {f"{a}.local": local for a in digits}))
                holes.append(rows)
            for combination in itertools.product(*holes):
                digits = {k: v for d, _ in combination for k, v in d.items()}
                fields = {k: v for _, f in combination for k, v in f.items()} | {
                    k: v for k, v in chosen.items() if k not in at
                }
                maps: dict[str, np.ndarray] = {}
                legal = all(
                    (self.value(dim.atoms[0], digits) or 0) in indices
                    for tensor in tensors.values() for dim, indices in zip(tensor.dims, tensor.ranges, strict=True)
                    if (dim.first or dim.stop or dim.step)
                )  # fmt: skip
                for name, tensor in tensors.items():
                    index = np.full([len(d) for d in dims], -1, dtype=np.int64)
                    for position in np.ndindex(*index.shape):
                        held = [dims[k][i] for k, i in enumerate(position)]
                        if any(pad for _, pad, _ in held):
                            continue
                        if next((t for t, _, _ in held if t), entry.form.tensor) != name:
                            continue
                        every = digits | {k: v for _, _, d in held for k, v in d.items()}
                        where = []
                        for dim in tensor.dims:
                            n = 0
                            for atom in dim.atoms:
                                n = n * self.size(atom) + (self.value(atom, every) or 0)
                            where.append(n)
                        index[position] = np.ravel_multi_index(where, tensor.sizes) if where else 0
                    maps[self.sizes.resolve_alias(name)] = index
                if legal:
                    out[entry.fill_name(fields)] = (tuple(len(d) for d in dims), maps)
        return out


def logical(weights: Weights, seed: int = 0) -> dict[str, np.ndarray]:
    """Random logical tensors, flat, all elements distinct."""
    rng = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    start = 1
    for name, tensor in weights.tensors.items():
        n = math.prod(tensor.sizes)
        out[name] = (rng.permutation(n) + start).astype(np.float32)
        start += n
    return out


def filled(weights: Weights, values: dict[str, np.ndarray]) -> dict[int, dict[str, np.ndarray]]:
    """Every rank's parameters, filled with logical tensors; padding is zero."""
    oracle = Oracle(weights)
    out: dict[int, dict[str, np.ndarray]] = {}
    for rank in weights.devices:
        out[rank] = {}
        for name, (shape, maps) in oracle.parameters(rank).items():
            array = np.zeros(shape, dtype=np.float32)
            for tensor, index in maps.items():
                array[index >= 0] = values[tensor][index[index >= 0]]
            out[rank][name] = array
    return out
