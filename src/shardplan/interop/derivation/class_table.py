"""`derive_class_table`: the tables of what a model class saves and of what it holds after loading, from its config."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.errors import LayoutError, ParseError, line
from shardplan.interop.derivation.disk_table import SavedShapes, disk_table
from shardplan.interop.derivation.model_class import Failure, ModelClass
from shardplan.movement.weights.derive import LoaderTrial, derive_table
from shardplan.movement.weights.probe import probe
from shardplan.movement.weights.table import WeightTable, shipped_tables
from shardplan.movement.weights.weights import Weights, make_weights


@dataclass(frozen=True, slots=True)
class ClassTable:
    """What was derived: the tables of a class's checkpoint and of its memory, and how that was found out.

    `disk` has a shipped table's name where one says the same. `ranks` are those of the trials; `elements` how many
    were compared at sizes that no trial had, 0 where the class has none.
    """

    disk: WeightTable
    memory: WeightTable
    loader: str
    ranks: tuple[int, ...]
    elements: int
    seconds: float


def derive_class_table(
    name: str,
    config: Mapping[str, Any] | None = None,
    *,
    reads: str | None = None,
    tensor: Sequence[int] = (),
    table: str = "derived",
) -> ClassTable:
    """Derive how a model class stores its weights, from runs of its own loader on small models.

    Args:
        name: the class, `package.module:Name`, or a name of transformers; or a function that makes a model of a config,
            called on every rank of a process group of as many ranks as a trial has.
        config: fields of its config; sizes are replaced by small ones where the class has a `config_class` of
            transformers, else they are taken as they are.
        reads: the class whose checkpoints it loads, if it is not itself (or transformers' of the same name, of a class
            with `load_weights`).
        tensor: how many ranks further trials have, each a mesh of one axis, `tensor`.
        table: what the table is called.

    Returns:
        The tables, each complete.

    Raises:
        ParseError: a class that is not there.
        LayoutError: sizes that follow the config by no rule, or storage that no expression gives.
        Infeasible: a package that is not installed.
    """
    begun = time.perf_counter()
    held = ModelClass.find(name)
    saves = held.saves() if reads is None else ModelClass.find(reads)
    shapes = SavedShapes(saves, saves.config(config or {}))
    disk = _shipped_table(shapes) or disk_table(shapes, f"{table}-disk")
    if tensor and held.kind == "from_pretrained":
        raise ParseError(f"{name} loads by from_pretrained, on one rank; legal is no tensor= degree")

    def trial(sizes: Mapping[str, Any], ranks: int) -> LoaderTrial:
        source = make_weights(disk, dict(sizes), {}, None, "f32")
        return LoaderTrial(source, held.loader(sizes, ranks), {"tensor": ranks} if tensor else {})

    try:
        memory = derive_table([trial(shapes.config, n) for n in (1, *tensor)], table)
        elements = 0
        if (other := shapes.unseen()) is not None:
            last = trial(other, max((1, *tensor)))
            found = probe(last.source, last.load, make_weights(memory, other, dict(last.mesh), None, "f32"))
            found.require()
            elements = found.elements
    except Failure as error:
        raise LayoutError(f"{name}: its loader failed: {line(error)}") from None
    return ClassTable(disk, memory, held.kind, (1, *tensor), elements, time.perf_counter() - begun)


def _shipped_table(shapes: SavedShapes) -> WeightTable | None:
    """The shipped table that says what a class saves, so that what is derived is of its family, or None."""
    kind = getattr(shapes.saves.make, "config_class", None)
    model = str(shapes.config.get("model_type", getattr(kind, "model_type", "")))
    for head in ("hf", "hf5"):
        name = f"{head}-{model.replace('_', '-')}"
        if name in shipped_tables():
            try:
                own = Weights.load(name, shapes.config, dtype="f32")
            except (LayoutError, ParseError):
                continue
            if {n: s for n, s, _ in own.parameters(0)} == dict(shapes.first):
                return own.table
    return None
