"""Who finds a fault in a refit: coverage, binding, copies, the handle, probe or diff; and whether it did harm at all.

Harm is decided without shardplan's proofs: what the refit gives is compared with what the slow converters, which are
written after the frameworks' own code, hold on the target's ranks.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import shardplan as sp
from shardplan.errors import LayoutError, ShardplanError
from shardplan.interop import safetensors
from shardplan.interop.checkpoint import diff
from shardplan.movement.weights.binding import WeightsMismatch
from shardplan.movement.weights.probe import probe
from shardplan.movement.weights.weights import Weights

from .weights_cases import TABLES, checkpoint, made

Held = dict[int, dict[str, np.ndarray]]
FINDERS = ("proof", "binding", "replicas", "handle", "probe", "diff")


@dataclass
class Session:
    """A refit that is right: two sides of one model, what their frameworks hold, and the checkpoint behind both."""

    kind: str
    names: tuple[str, str]
    config: dict[str, Any]
    given: tuple[dict[str, Any], dict[str, Any]]
    whole: dict[str, np.ndarray]
    weights: tuple[Weights, Weights]
    held: tuple[Held, Held]

    @property
    def disk(self) -> Weights:
        """How the checkpoint is stored."""
        return Weights.load(next(iter(TABLES[self.kind])), self.config, dtype="f32")

    def loader(self, k: int) -> Callable[[Mapping[str, np.ndarray]], Held]:
        """What the framework of a side makes of a checkpoint, on that side's ranks."""
        make, _, more = TABLES[self.kind][self.names[k]]
        devices = self.weights[k].devices

        def load(named: Mapping[str, np.ndarray]) -> Held:
            found = make(self.config, dict(named), **self.given[k], **more)
            return {devices[rank]: tensors for rank, tensors in found.items()}

        return load

    def load(self, k: int, config: dict[str, Any] | None = None, **given: Any) -> Weights:
        """A side as a user says it: with another config, or other degrees."""
        side = self.weights[k]
        return Weights.load(
            self.names[k], config or self.config, devices=side.devices, dtype="f32", **(given or self.given[k])
        )


def session(kind: str, a: str, b: str, rng: random.Random, config: dict[str, Any] | None = None) -> Session:
    """A refit of a pair of tables at random shapes and degrees; the target stands on devices of its own."""
    c = made(kind, rng) | (config or {})
    whole = checkpoint(kind, c, np.random.default_rng(rng.randrange(2**32)))
    sides: list[Weights] = []
    held: list[Held] = []
    every: list[dict[str, Any]] = []
    first = 0
    for name in (a, b):
        make, degrees, more = TABLES[kind][name]
        given = degrees(c, rng)
        found = make(c, whole, **given, **more)
        sides.append(Weights.load(name, c, devices=range(first, first + len(found)), dtype="f32", **given))
        held.append({first + rank: dict(named) for rank, named in found.items()})
        every.append(given)
        first += len(found)
    return Session(kind, (a, b), c, (every[0], every[1]), whole, (sides[0], sides[1]), (held[0], held[1]))


@dataclass
class Fault:
    """What went wrong in a session: what the user says of either side, what ranks really hold, and what came of it.

    `sides` raises where a side cannot be said so. `run` is what is called in place of the reference of the plan: it
    returns what the target's ranks hold, and the error of the handle where that refused.
    """

    kind: str
    says: str
    sides: Callable[[], tuple[Weights, Weights]]
    source: Held | None = None
    run: Callable[[Any, Held], tuple[Held, ShardplanError | None]] | None = None


@dataclass
class Verdict:
    """Who found a fault, first and all, in its words; `harm` is whether the target would have held something wrong."""

    harm: bool
    by: str = ""
    words: str = ""
    every: list[str] = field(default_factory=list)


def judged(s: Session, fault: Fault) -> Verdict:
    """Take a faulty session through all that a user has, in the order in which it comes."""
    try:
        sides = fault.sides()
        plan = sp.refit(*sides)
    except ShardplanError as error:
        return Verdict(True, "proof", line(error), ["proof"])
    source = s.held[0] if fault.source is None else fault.source
    try:
        for rank in sides[0].devices:
            sides[0].check(source.get(rank, {}), rank)
        for rank in sides[1].devices:
            sides[1].check(s.held[1].get(rank, {}), rank)
        after, refused = plan.apply(source, compare_replicas=False), None
        if fault.run is not None:
            after, refused = fault.run(plan, source)
    except WeightsMismatch as error:
        return Verdict(True, "binding", line(error), ["binding"])
    found: dict[str, str] = {}
    try:
        plan.apply(source)
    except LayoutError as error:
        found["replicas"] = line(error)
    if refused is not None:
        found["handle"] = line(refused)
    for k in (0, 1):
        if str(sides[k]) != str(s.weights[k]) and "probe" not in found:
            said = probed(s, k, sides[k])
            if said:
                found["probe"] = said
    said = compared(s, after)
    if said:
        found["diff"] = said
    by = next((name for name in FINDERS if name in found), "")
    return Verdict(harmful(s.held[1], after), by, found.get(by, ""), [n for n in FINDERS if n in found])


def alarms(s: Session) -> list[str]:
    """What is found in a session that is right: nothing, or what finds it is wrong itself."""
    verdict = judged(s, Fault("", "", lambda: s.weights))
    found = [f"{verdict.by}: {verdict.words}"] if verdict.by else []
    found += ["the refit differs from the slow converters"] if verdict.harm else []
    return found + [f"probe: {said}" for k in (0, 1) if (said := probed(s, k, s.weights[k]))]


def line(error: BaseException) -> str:
    """The first line of an error."""
    return str(error).splitlines()[0]


def harmful(wanted: Held, after: Held) -> bool:
    """Whether any byte of any parameter is not what the framework's code holds there."""
    return any(
        name not in after.get(rank, {}) or after[rank][name].tobytes() != array.tobytes()
        for rank, named in wanted.items()
        for name, array in named.items()
    )


def probed(s: Session, k: int, side: Weights) -> str:
    """What a probe of a side says, with the slow converter as the framework's loader; nothing where it is right."""
    try:
        differences = probe(s.disk, s.loader(k), side).differences
    except LayoutError as error:
        return line(error)
    return str(differences[0]) if differences else ""


def compared(s: Session, after: Held) -> str:
    """What `diff` says of the target and the checkpoint, both as files; nothing where they hold one model."""
    with tempfile.TemporaryDirectory() as folder:
        served, disk = Path(folder) / "served", Path(folder) / "disk"
        disk.mkdir()
        safetensors.write(disk / "model.safetensors", s.whole, {"format": "pt"})
        for place, rank in enumerate(s.weights[1].devices):
            own = served / f"rank-{place:05d}"
            own.mkdir(parents=True)
            named = {n: np.ascontiguousarray(a) for n, a in after[rank].items()}
            safetensors.write(own / "model.safetensors", named, {"format": "pt"})
        try:
            found = diff(served, disk, weights=s.weights[1], other=s.disk, memory_limit="64 MB")
        except ShardplanError as error:
            return line(error)
        return str(found.difference) if found.difference else ""
