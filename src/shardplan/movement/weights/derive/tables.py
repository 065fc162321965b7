"""`derive_table`: a table from trials of a framework's loader, which is compared with every trial, bit for bit."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardplan.errors import LayoutError
from shardplan.movement.weights.derive.family_form import family_form
from shardplan.movement.weights.derive.holes import RankHole, hole_of, values_of
from shardplan.movement.weights.derive.sides import SeenTrials
from shardplan.movement.weights.derive.trials import LoaderTrial, SeenTrial, run_trial
from shardplan.movement.weights.drops import left_out
from shardplan.movement.weights.form import StoredForm, axes_of, parse_product
from shardplan.movement.weights.probe import number_elements, origin, widen_dtypes
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.table import TableParameter, WeightTable
from shardplan.movement.weights.weights import make_weights


def derive_table(trials: Sequence[LoaderTrial], name: str = "derived") -> WeightTable:
    """Derive how a framework stores a model from what its own loader makes of tensors that carry their index.

    Args:
        trials: runs of the loader. The first is on one rank, with layers, heads and experts of at least 2; those at
            other sizes and degrees say how the dims are cut, pad, and follow the sizes.
        name: what the table is called.

    Returns:
        A table of the source's family; `toml()` is its text. It gives what every trial has, bit for bit, and is to be
        compared with others by `probe`: of expressions that fit the trials, the first is taken.

    Raises:
        LayoutError: what no expression gives, in one line that names the parameter.
    """
    if not trials or trials[0].ranks != 1:
        raise LayoutError("a table is derived from no trial on one rank; legal is one, before those on several")
    runs = SeenTrials([run_trial(t) for t in trials])
    found = _table(runs, name)
    for s in runs.every:
        _check_trial(s, found)
    return found


def _table(runs: SeenTrials, name: str) -> WeightTable:
    atoms = dict.fromkeys(a for f in runs.families for a in f.holes.values())
    holes = {a: _hole(runs, a) for a in atoms}
    meshes: list[str] = []
    forms: list[StoredForm] = []
    for k, family in enumerate(runs.families):
        cut = {axis for a in family.holes.values() for axis in axes_of(parse_product(holes[a]))}
        try:
            mesh, form = family_form(runs, k, [m for m in runs.meshes if cut <= set(runs.axes(m))])
        except LayoutError as error:
            raise LayoutError(f"{family.first}: {error}") from None
        meshes.append(mesh)
        forms.append(form)
    entries: list[TableParameter] = []
    for k, family in enumerate(runs.families):
        local = {a: _local(runs, k, a, holes[a], meshes[k]) for a in family.holes.values()}
        on = () if family.holes else _find_axis_ends(runs, k, meshes[k])
        entries.append(TableParameter(family.name(local), forms[k], on, mesh=meshes[k]))
    return _assemble_table(runs, entries, holes, name)


def _assemble_table(
    runs: SeenTrials, entries: Sequence[TableParameter], holes: Mapping[str, str], name: str
) -> WeightTable:
    of = runs.source.table
    axes = {mesh: runs.axes(mesh) for mesh in runs.meshes}
    data: dict[str, Any] = {
        "name": name,
        "source": f"derived from {len(runs.every)} runs of its loader on {of.name}",
        "meshes": {mesh or "main": found for mesh, found in axes.items()},
        "degrees": {a: 1 for found in axes.values() for a in found},
        "of": tomllib.loads(of.toml()).get("of", {}),
        "atoms": dict(of.atoms) | runs.names.sizes,
        "split": {atom: " ".join(parts) for atom, parts in runs.names.split.items()},
        "holes": dict(holes),
        "parameters": [
            {"name": p.name, "is": str(p.form), "on": dict(p.on)} | ({"mesh": p.mesh} if p.mesh else {})
            for p in entries
        ],
    }
    return WeightTable.of(data, name)


def _hole(runs: SeenTrials, atom: str) -> str:
    """The expression of a dim that stands in names."""
    mine = [k for k, f in enumerate(runs.families) if atom in f.holes.values()]
    values: dict[tuple[int, int], set[int]] = {place: set() for place in runs.ranks}
    for k in mine:
        counted = all(m.of.numbers[atom] == m.of.at[atom] for m in runs.of[k] if atom in m.of.at)
        for m in runs.of[k]:
            if atom in m.of.at or counted:  # a part without elements says its number only
                values[m.trial, m.rank].add(m.of.at.get(atom, m.of.numbers[atom]))
    for mesh in runs.meshes:
        axes = runs.differing([(t, r, (0, *sorted(v))) for (t, r), v in values.items()], mesh)
        ranks = [RankHole(t, frozenset(v), runs.scenery(t, r, mesh, {})) for (t, r), v in values.items()]
        found = hole_of(atom, ranks, axes)
        if found is not None:
            return found
    raise LayoutError(
        f"{runs.families[mine[0]].first}: ranks have {atom} in their names by no rule of a cut; legal are even, ~, "
        ".ceil, .first, .last and .robin over axes of one mesh"
    )


def _local(runs: SeenTrials, k: int, atom: str, hole: str, mesh: str) -> bool:
    """Whether a number in the names of a family counts from 0 on every rank."""
    mine = [m for m in runs.of[k] if atom in m.of.at]
    if all(m.of.numbers[atom] == m.of.at[atom] for m in mine):
        return False
    for m in mine:
        values = values_of(parse_product(hole), atom, runs.scenery(m.trial, m.rank, mesh, {})) or []
        if m.of.at[atom] not in values or values.index(m.of.at[atom]) != m.of.numbers[atom]:
            raise LayoutError(
                f"{m.of.name} of rank {m.rank} has {atom} = {m.of.at[atom]}; legal is its number, or its place there"
            )
    return True


def _find_axis_ends(runs: SeenTrials, k: int, mesh: str) -> tuple[tuple[str, str | int], ...]:
    """Where a parameter is that is not on all ranks: at the first or last of an axis."""
    found: list[tuple[str, str | int]] = []
    has = {(m.trial, m.rank) for m in runs.of[k]}
    for axis in runs.differing([(t, r, (0, (t, r) in has)) for t, r in runs.ranks], mesh):
        trials = [(runs.every[t].trial, r) for t, r in has]
        places = {(t.mesh_coordinate(r, mesh)[axis], t.axes(mesh)[axis]) for t, r in trials if axis in t.axes(mesh)}
        if all(at == 0 for at, _ in places):
            found.append((axis, "first"))
        elif all(at == n - 1 for at, n in places):
            found.append((axis, "last"))
        else:
            some = ", ".join(f"{at} of {n}" for at, n in sorted(places))
            raise LayoutError(f"{runs.families[k].first} is at {some} of {axis}; legal is the first, or the last")
    return tuple(found)


def _check_trial(s: SeenTrial, table: WeightTable) -> None:
    """Raise `LayoutError` unless a table gives what a trial has."""
    source = s.trial.source
    numbers, _ = number_elements(source)
    degrees = {**s.trial.mesh, **{a: n for mesh in s.trial.meshes.values() for a, n in mesh.items()}}
    target = make_weights(table, dict(source.config), degrees, None, "f64")
    (rank,) = source.devices
    wide = {n: a.astype(np.float64) for n, a in numbers.items()}
    whole = widen_dtypes(source, "f64")
    drop = [left.tensor for left in left_out(whole, target)]  # what the loader does not take
    for r, named in refit(whole, target, drop=drop).apply({rank: wide}).items():
        target.check(s.numbers[r], r)
        for name, said in named.items():
            wrong = np.flatnonzero((said != s.numbers[r][name]).reshape(-1))
            if len(wrong):
                at = [int(i) for i in np.unravel_index(int(wrong[0]), said.shape)]
                here, there = (origin(int(a[tuple(at)]), numbers) for a in (s.numbers[r][name], said))
                raise LayoutError(
                    f"{name}{at} of rank {r} is {here}, and what is derived says {there}; legal is one expression for "
                    "all trials"
                )
