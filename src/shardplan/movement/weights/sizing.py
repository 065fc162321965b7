"""Sizes: of degrees, meshes, atoms and logical tensors, worked out of a table and a config when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardplan.core.dtypes import short_name
from shardplan.errors import LayoutError, excerpt
from shardplan.movement.weights.arithmetic import evaluate_arithmetic, evaluate_whole_number
from shardplan.movement.weights.cuts import OwnerTable
from shardplan.movement.weights.family import StoredFamily, Terms, lower
from shardplan.movement.weights.logical import LogicalTensor, logical_dims
from shardplan.movement.weights.table import TableParameter, WeightTable

MOST_DEVICES = 2**20


class TableSizes(Mapping[str, int]):
    """Sizes of a table under a config and degrees, worked out when they are asked for."""

    def __init__(self, table: WeightTable, config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self.table, self.config = table, config
        self.tables: dict[str, OwnerTable] = {k: v for k, v in given.items() if not isinstance(v, int)}
        self.used: set[str] = set()
        self.atoms, self.defaults = dict(table.atoms), dict(table.defaults)
        self.known: dict[str, int | None] = {}
        self.degrees: dict[str, int] = {}
        for name, default in table.degrees:
            value = given.get(name, default)
            self.degrees[name] = (
                value if isinstance(value, int) else evaluate_whole_number(value, self.look, f"the degree {name}")
            )
            if not 1 <= self.degrees[name] <= MOST_DEVICES:
                raise LayoutError(f"the degree {name} is {excerpt(self.degrees[name])}; legal is 1 to {MOST_DEVICES}")
        self.numbers = {name: evaluate_whole_number(text, self.look, name) for name, text in table.numbers}
        self.meshes = {name: {a: self._axis(a) for a in axes} for name, axes in table.meshes}
        self.count = math.prod(self.meshes[""].values())
        if self.count > MOST_DEVICES:
            raise LayoutError(f"the mesh has {self.count} devices; legal are {MOST_DEVICES} at most")
        for name, axes in self.meshes.items():
            product = math.prod(axes.values())
            if product != self.count:
                said = ", ".join(f"{a}={n}" for a, n in axes.items())
                raise LayoutError(
                    f"the mesh {name} ({said}) has {product} devices, and the first has {self.count}; legal is as many"
                )

    def _axis(self, axis: str) -> int:
        if axis not in self.degrees:
            raise LayoutError(f"the axis {axis} has no degree; legal are {', '.join(self.degrees)}")
        return self.degrees[axis]

    def look(self, name: str) -> Any:
        """The value of a name: an atom, a degree, or a key of the config; None where there is none."""
        if name in self.atoms:
            return self.size(name)
        if name in self.degrees:
            return self.degrees[name]
        self.used.add(name)
        said = self.config.get(name)
        return self.defaults.get(name) if said is None else said

    def size(self, atom: str) -> int:
        """The size of an atom."""
        if atom not in self.known:
            self.known[atom] = None
            self.known[atom] = evaluate_whole_number(self.atoms[atom], self.look, atom)
        found = self.known[atom]
        if found is None:
            raise LayoutError(f"the atom {atom} = {self.atoms[atom]} needs itself; legal is arithmetic over others")
        return found

    def __getitem__(self, atom: str) -> int:
        """Return the size of an atom."""
        if atom not in self.atoms:
            raise KeyError(atom)
        return self.size(atom)

    def __iter__(self) -> Iterator[str]:
        """Yield the atoms."""
        return iter(self.atoms)

    def __len__(self) -> int:
        """Return the number of atoms."""
        return len(self.atoms)

    def holds(self, condition: str) -> bool:
        """Whether a condition holds."""
        return bool(evaluate_arithmetic(condition, self.look))

    def has(self, parameter: TableParameter) -> bool:
        """Whether a parameter is there under this config."""
        return not (parameter.when and not self.holds(parameter.when)) and not (
            parameter.unless and self.holds(parameter.unless)
        )

    def tensor(self, name: str) -> LogicalTensor:
        """A logical tensor with its sizes."""
        texts = dict(self.table.tensors)
        if name not in texts:
            raise LayoutError(f"{name} is no tensor of the family; legal are {', '.join(texts)}")
        dims = logical_dims(name, texts[name])
        sizes: list[int] = []
        ranges: list[range] = []
        for dim in dims:
            size = 1
            for atom in dim.atoms:
                if atom not in self.atoms:
                    raise LayoutError(
                        f"{name} = {texts[name]}: the atom {atom} has no size; legal are {', '.join(self.atoms)}"
                    )
                size *= self.size(atom)
            sizes.append(size)
            texts_of = (dim.first or "0", dim.stop or str(size), dim.step or "1")
            first, stop, step = (evaluate_whole_number(t, self.look, f"the range of {name}") for t in texts_of)
            if step < 1:
                raise LayoutError(f"{name}: {dim} goes on by {step}; legal is a step of at least 1")
            ranges.append(range(first, stop, step))
        return LogicalTensor(name, dims, tuple(sizes), tuple(ranges))

    def resolve_alias(self, name: str) -> str:
        """The tensor that a tensor is, where it is another one under this config."""
        for tensor, other, when in self.table.same:
            if tensor == name and (not when or self.holds(when)):
                return self.resolve_alias(other)
        return name

    def family(self, entry: TableParameter, dtype: str) -> StoredFamily:
        """A parameter, lowered; tensors that are another one stand under its name."""
        axes = self.meshes.get(entry.mesh)
        if axes is None:
            raise LayoutError(
                f"{entry.name} is on the mesh {entry.mesh}; legal are {', '.join(filter(None, self.meshes))}"
            )
        terms = Terms(self, dict(self.table.split), dict(self.table.holes), self.tables, self.numbers)
        known = dict(self.table.dtypes)
        dtypes = {known.get(t, "") for t in entry.form.tensors}
        if len(dtypes) > 1 and not entry.dtype:
            raise LayoutError(f"{entry.name} joins tensors of {' and '.join(sorted(dtypes))}; legal is one dtype")
        dtype = entry.dtype or next(iter(dtypes), "") or dtype
        found = lower(entry, [self.tensor(t) for t in entry.form.tensors], axes, terms, short_name(dtype))
        renamed = {self.resolve_alias(t): runs for t, runs in found.tensors.items()}
        if len(renamed) < len(found.tensors):
            raise LayoutError(f"{entry.name} holds one tensor twice; legal is each once")
        return replace(found, tensors=renamed)
