"""All trials together: families and their parameters on every rank, and sizes of atoms in every trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.errors import LayoutError
from shardplan.movement.weights.arithmetic import evaluate_whole_number
from shardplan.movement.weights.derive.holes import SeenMember, families_of, members
from shardplan.movement.weights.derive.trials import SeenTrial
from shardplan.movement.weights.derive.wholes import AtomNames
from shardplan.movement.weights.pieces import FormContext


@dataclass(frozen=True, slots=True)
class PlacedMember:
    """A parameter of a family on a rank of a trial."""

    trial: int
    rank: int
    of: SeenMember


class SeenTrials:
    """The trials, their families, and the atoms that the table needs beyond the source's."""

    def __init__(self, every: Sequence[SeenTrial]) -> None:
        """Sort what every rank has into families; raises `LayoutError` where a parameter is in none."""
        self.every = every
        self.source = every[0].trial.source
        self.names = AtomNames()
        self.families = families_of(every[0])
        self.of: list[list[PlacedMember]] = [[] for _ in self.families]
        for t, s in enumerate(every):
            for rank in range(s.trial.ranks):
                for k, member in members(self.families, s, rank):
                    self.of[k].append(PlacedMember(t, rank, member))

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """The trials and ranks."""
        return [(t, r) for t, s in enumerate(self.every) for r in range(s.trial.ranks)]

    @property
    def meshes(self) -> list[str]:
        """The names of all meshes, the first `""`."""
        return list(dict.fromkeys(("", *(m for s in self.every for m in s.trial.meshes))))

    def axes(self, mesh: str) -> list[str]:
        """Return the axes of a mesh, major first."""
        every = [s.trial.axes(mesh) for s in self.every if mesh in ("", *s.trial.meshes)]
        return list(dict.fromkeys(a for axes in every for a in axes))

    def weights(self, trial: int, along: Mapping[str, int]) -> tuple[dict[int, dict[str, int]], dict[str, int]]:
        """Return how far the logical index goes with each digit, by the number of a tensor; and those numbers."""
        s = self.every[trial]
        sizes = self.sizes(trial, {})
        out: dict[int, dict[str, int]] = {}
        for tensor, dim in along.items():
            if dim < 0 or tensor not in s.tensors:
                continue
            steps: dict[str, int] = {}
            step = 1
            for atom in reversed(s.trial.source.tensors[tensor].dims[dim].atoms):
                for digit in reversed((atom, *self.names.split.get(atom, ()))):
                    if digit == atom and atom in self.names.split:
                        steps[atom] = step // sizes[atom]
                        continue
                    steps[digit] = step
                    step *= sizes[digit]
            out[s.tensors.index(tensor)] = steps
        return out, {t: i for i, t in enumerate(s.tensors)}

    def sizes(self, trial: int, more: Mapping[str, str], mesh: str = "") -> dict[str, int]:
        """Return the sizes of all atoms in a trial."""
        source = self.every[trial].trial.source
        out: dict[str, int] = {}
        for atom, _ in source.table.atoms:
            try:
                out[atom] = source.sizing.size(atom)
            except LayoutError:
                continue  # one that this config does not need
        config, axes = dict(source.config), dict(self.every[trial].trial.mesh)
        if mesh in self.every[trial].trial.meshes:
            axes |= self.every[trial].trial.meshes[mesh]

        def look(name: str) -> Any:
            return out.get(name, axes.get(name, config.get(name, 1)))

        for atom, text in {**self.names.sizes, **more}.items():
            out[atom] = evaluate_whole_number(text, look, atom)
        return out

    def scenery(self, trial: int, rank: int, mesh: str, more: Mapping[str, str]) -> FormContext:
        """Return what an expression is read with on a rank."""
        of = self.every[trial].trial
        own = mesh if mesh in of.meshes else ""
        axes, at = dict(of.axes(own)), of.mesh_coordinate(rank, own)
        for s in self.every:  # one rank may say no axes
            for axis in s.trial.axes(mesh) if mesh in ("", *s.trial.meshes) else ():
                axes.setdefault(axis, 1)
                at.setdefault(axis, 0)
        return FormContext(self.sizes(trial, more, mesh), axes, {}, at)

    def differing(self, keys: Sequence[tuple[int, int, Any]], mesh: str) -> list[str]:
        """Return the axes along which ranks differ, in order of the mesh; keys with unlike heads are not compared."""
        found: dict[str, None] = {}
        for t, s in enumerate(self.every):
            if mesh and mesh not in s.trial.meshes:
                continue
            at = {r: s.trial.mesh_coordinate(r, mesh) for r in range(s.trial.ranks)}
            for axis in s.trial.axes(mesh):
                others: dict[Any, set[Any]] = {}
                for r, (kind, *said) in ((r, key) for trial, r, key in keys if trial == t):
                    where = (kind, *(v for a, v in at[r].items() if a != axis))
                    others.setdefault(where, set()).add(tuple(said))
                if any(len(several) > 1 for several in others.values()):
                    found[axis] = None
        order = [a for s in self.every if mesh in ("", *s.trial.meshes) for a in s.trial.axes(mesh)]
        return sorted(found, key=order.index)
