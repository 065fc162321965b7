"""`HandedPlan`: a model, a topology, a strategy, what was predicted, as JSON and back; `WrittenFiles` of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core import validation
from shardplan.core.decoding import decode_json, read_text
from shardplan.errors import ParseError, ShardplanError, excerpt, line
from shardplan.hardware.topology import Topology
from shardplan.simulation.searching.certifier import even_cuts
from shardplan.simulation.searching.plans import RankedPlan
from shardplan.strategy.model import Model
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.strategy import FIELDS, Strategy

FORMAT = "shardplan handed plan 1"
ORDER = ("pipeline", "data", "context", "tensor")  # of a strategy's devices, outermost first


@dataclass(frozen=True, slots=True)
class HandedPlan:
    """A plan as it is handed over.

    Args:
        title: What the model is called.
        name: The preset or family that `Model.load` takes.
        fields: What it takes beside.
        topology: On what.
        strategy: How.
        order: How blocks of axes lie on the topology, outermost first.
        predicted: Numbers by name, in the units of the name, and texts.
    """

    title: str
    name: str
    fields: Mapping[str, Any]
    topology: Topology
    strategy: Strategy
    order: tuple[str, ...] = ORDER
    predicted: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def model(self) -> Model:
        """The model."""
        return Model.load(self.name, **dict(self.fields))

    def device_mesh(self) -> np.ndarray:
        """Return the topology's id at every coordinate, int64 [pipeline, data, context, tensor]."""
        return RankedPlan(self.strategy, 0.0, 0.0, self.order).device_mesh()

    def stage_layers(self) -> list[range]:
        """Return the layers of every stage, in every round of an interleaved schedule: those of the plan's cuts."""
        model, stages = self.model, self.strategy.pipeline * (self.strategy.interleave or 1)
        layers = int(model.fields["layers"])
        bounds = [0, *(even_cuts(model, self.strategy) or (k * layers // stages for k in range(1, stages))), layers]
        return [range(a, b) for a, b in itertools.pairwise(bounds)]

    def to_json(self) -> str:
        """Return it as a file.

        >>> plan = HandedPlan("tiny", "gpt2-xs", {"seq": 8}, Topology.load("dgx-a100", nodes=1), Strategy(data=8))
        >>> HandedPlan.parse(plan.to_json()) == plan
        True
        """
        plain = Strategy()
        said = {k: getattr(self.strategy, k) for k in FIELDS}
        said = {k: str(v) if isinstance(v, Schedule) else v for k, v in said.items() if v != getattr(plain, k)}
        data = {"format": FORMAT, "title": self.title, "model": self.name, "fields": dict(self.fields),
                "topology": str(self.topology), "strategy": said, "order": list(self.order),
                "predicted": dict(self.predicted)}  # fmt: skip
        return json.dumps(data, indent=1) + "\n"

    @staticmethod
    def parse(text: str, what: str = "plan.json") -> HandedPlan:
        """Return what a file says; raises `ParseError` where it is none, and as strategies and topologies do."""
        data = decode_json(text, dict[str, Any])
        if data.get("format") != FORMAT:
            raise ParseError(f"{what}: format {excerpt(data.get('format'))}; legal is {FORMAT!r}")
        kinds = {"title": str, "model": str, "fields": dict, "topology": str, "strategy": dict, "order": list,
                 "predicted": dict}  # fmt: skip
        for name, kind in kinds.items():
            if not isinstance(data.get(name), kind):
                raise ParseError(f"{what}: {name} is {excerpt(data.get(name))}; legal is a {kind.__name__}")
        if sorted(map(str, data["order"])) != sorted(ORDER):
            raise ParseError(f"{what}: order is {excerpt(data['order'])}; legal are {', '.join(ORDER)} in any order")
        said: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data["strategy"].items()
        }  # JSON has no tuples
        if unknown := said.keys() - {*FIELDS}:
            raise ParseError(f"{what}: a strategy has no {min(unknown)}")
        if str(said.get("schedule", "")).startswith("schedule "):
            said["schedule"] = Schedule.parse(said["schedule"])
        topology = Topology.parse(validation.text(f"{what}: topology", data["topology"], ShardplanError))
        return HandedPlan(
            data["title"], data["model"], data["fields"], topology, Strategy(**said), tuple(data["order"]),
            data["predicted"],
        )  # fmt: skip

    @staticmethod
    def load(path: str | Path) -> HandedPlan:
        """Read a file, or the one of a folder; raises `ParseError` as `parse` does."""
        where = Path(path)
        where = where / "plan.json" if where.is_dir() else where
        return HandedPlan.parse(read_text(where, legal="a folder that plan --out wrote"), line(where))


def find_handed(path: str | Path) -> HandedPlan | None:
    """Return the plan of a folder that `plan --out` wrote, or of its file; None for a path that is none of both."""
    where = Path(path)
    if where.is_dir():
        return HandedPlan.load(where)
    with suppress(OSError, UnicodeDecodeError), where.open() as file:
        return HandedPlan.load(where) if FORMAT.rpartition(" ")[0] in file.read(200) else None
    return None


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """Texts by file name; what cannot be said, a line each; and the strategy that runs there, whose price counts."""

    framework: str
    files: Mapping[str, str]
    lines: tuple[str, ...]
    runs: Strategy


def comment_lines(lines: tuple[str, ...]) -> str:
    """Return lines as the comments that begin a file; nothing where there are none."""
    return "".join(f"# cannot be said: {line}\n" for line in lines)
