"""`fit`: whether a model's step fits into the memory of a device, what takes it, and what to change where it does not.

A change is one choice made otherwise: the degrees, of which a factor goes from one axis to another; the size of
microbatches; the schedule; what is computed again, and of how many layers; how state is dealt out, and to how many
replicas; and so on. All strategies of the search's space that are up to `MOST` choices away are priced, under every
`shard` where one is asked for. What is `KEPT` stays as it was asked, since it changes numbers or the software, and is
said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shardplan.core import validation
from shardplan.errors import ShardplanError, excerpt
from shardplan.hardware.topology import Topology, topology_of
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.notebook import notebook_html
from shardplan.simulation.closed.configurations import ALL, CODES, THOUSANDTHS, Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import check_topology_size, of_machine
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.searching.certifier import ROOM, Certifier, certified_first
from shardplan.simulation.searching.space import ALIKE, BLOCKS, FRAME, INSIDE, SCHEDULES, StrategySpace, divisors
from shardplan.strategy.model import Model
from shardplan.strategy.options import check_options
from shardplan.strategy.runtimes import runtime_of
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.strategy import FIELDS, Strategy
from shardplan.strategy.strategy_text import strategy_text

Ints = np.ndarray
MOST = 2  # choices that are changed at once
SPARE = 6  # changes more than are told that are tried, for those that certification refuses
KEPT = tuple(name for name in ALIKE if name != "shard")  # what changes numbers, or is the software's
ALONE = ("expert", "microbatch", "sequence_parallel", "context_kind")  # fields of a frame that are a choice each


class Change(NamedTuple):
    """A strategy near the one asked for: what it says otherwise, in how many choices, its seconds and peak bytes."""

    said: str
    choices: int
    strategy: Strategy
    seconds: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a strategy fits under its `runtime`; `held` is of the pipeline rank that holds most, largest first.

    Bytes are certified: those of the job that the strategy comes to; `uncertified` says why they are not, where no job
    can be made of it, and they are the closed form's. Changes are certified to fit.
    """

    strategy: Strategy
    seconds: float
    peak_bytes: float
    memory: float
    rank: int
    held: tuple[tuple[str, float], ...]
    changes: tuple[Change, ...]
    uncertified: str = ""

    _repr_html_ = notebook_html

    @property
    def runtime(self) -> str:
        """The framework whose memory it is: see `strategy.runtimes`."""
        return runtime_of(self.strategy).name

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory."""
        return self.peak_bytes <= self.memory

    @property
    def kept_fields(self) -> tuple[tuple[str, Any], ...]:
        """What was asked for and no change has otherwise, with its value; what is as by default is left out."""
        return tuple((name, value) for name, value in self.strategy.non_defaults().items() if name in KEPT)

    def to_dict(self) -> dict[str, Any]:
        """Return it as one object of JSON."""
        return {
            "strategy": strategy_text(self.strategy),
            "fits": self.fits,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "memory": self.memory,
            "runtime": self.runtime,
            "rank": self.rank,
            "held": [{"what": what, "bytes": nbytes} for what, nbytes in self.held],
            "uncertified": self.uncertified,
            "kept": dict(self.kept_fields),
            "changes": [{**one._asdict(), "strategy": strategy_text(one.strategy)} for one in self.changes],
        }

    def __str__(self) -> str:
        """Return what is held, a line each, then the changes."""
        peak, memory = format_bytes(self.peak_bytes), format_bytes(self.memory)
        verdict = f"fits: {peak} of {memory}" if self.fits else f"does not fit: {peak}, and a device has {memory}"
        seconds = format_seconds(self.seconds)
        lines = [f"{verdict} as {self.runtime} has it; {seconds} a step; pipeline rank {self.rank} holds most:"]
        lines += [f"  {format_bytes(nbytes):>10}  {what}" for what, nbytes in self.held]
        lines += [f"not certified, as no job can be made of it: {self.uncertified}"] if self.uncertified else []
        return "\n".join([*lines, *self.change_lines()])

    def change_lines(self) -> list[str]:
        """Return what would fit, a line each, the cheapest first; none where it fits."""
        if not self.fits and not self.changes:
            return [f"nothing up to {MOST} choices away fits; shardplan plan without --fit searches all strategies"]
        told = ["what would fit:"] if self.changes else []
        for one in sorted(self.changes, key=lambda one: one.seconds):
            more = 100 * (one.seconds / self.seconds - 1)
            told.append(f"  {format_bytes(one.peak_bytes):>10}  {more:+6.1f} % of time  {one.said}")
        kept = " ".join(_field_text(name, value) for name, value in self.kept_fields)
        return [*told, f"kept as asked: {kept}"] if not self.fits and kept else told


def fit(
    model: Model, strategy: Strategy, topology: Topology | str, params: Parameters | None = None, top: int = 3
) -> Fit:
    """Say whether a training step fits, and what near it would: priced by the closed form, certified by the job.

    Args:
        model: What is trained.
        strategy: How; its devices are all of the topology's.
        topology: On what, or its text.
        params: Of the machine; by default those that ship.
        top: How many changes are told for each number of choices; the quickest that fit.

    Raises `ShardplanError` for a topology of another size, and a schedule of one's own; `LayoutError` for a strategy
    that says what is only partitioned, or what does nothing for the model.

    >>> model = Model.load("gpt", layers=4, hidden=256, heads=4, seq=128, vocab=1000, precision="bf16")
    >>> fit(model, Strategy(data=8, global_batch=64), Topology.load("dgx-a100-80g", nodes=1)).fits
    True
    """
    where = topology_of("the topology", topology)
    validation.whole_number("fit: top", top, 1, kind=ShardplanError)
    check_topology_size("fit", where, strategy)
    if isinstance(strategy.schedule, Schedule):
        raise ShardplanError(f"fit: schedule {excerpt(strategy.schedule)}; legal is a name")
    check_options(model, strategy)
    form, memory = ClosedForm(model, where, params or of_machine(where)), where.device.memory
    asked = Configurations.of([strategy])
    out = form(asked)
    seconds = float(out.seconds[0])
    certifier, uncertified = Certifier(model, form.parameters, memory), ""
    try:
        peak, rank, parts = certifier.peak(strategy)
    except ShardplanError as error:
        held = form.holdings(asked)
        rank, uncertified = int(np.argmax(np.sum(list(held.values()), axis=0))), str(error)
        peak = float(out.peak_bytes[0])
        parts = tuple(sorted(((what, float(x[rank])) for what, x in held.items()), key=lambda x: -x[1]))
    changes = () if peak <= memory else tuple(_near(model, strategy, asked, form, certifier, top))
    parts = tuple(part for part in parts if part[1] > 0)
    return Fit(strategy, seconds, peak, memory, rank, parts, changes, uncertified)


def _near(
    model: Model, strategy: Strategy, asked: Configurations, form: ClosedForm, certifier: Certifier, top: int
) -> list[Change]:
    """The quickest that are certified to fit, of each number of choices."""
    near, choices = _strategies_near(model, strategy, asked)
    out = form(near)
    found: list[Change] = []
    for count in range(1, MOST + 1):
        these = np.flatnonzero((choices == count) & (out.peak_bytes <= certifier.memory * ROOM))
        order = these[np.lexsort((out.peak_bytes[these], out.seconds[these]))][: top + SPARE].tolist()
        for at, peak in certified_first(certifier, (near.strategy(k) for k in order), top):
            one = near.strategy(order[at])
            found.append(Change(_said(strategy, one), count, one, float(out.seconds[order[at]]), peak.nbytes))
    return found


def _strategies_near(model: Model, strategy: Strategy, asked: Configurations) -> tuple[Configurations, Ints]:
    """Strategies up to `MOST` choices away, and in how many choices each differs, [n]."""
    col = asked.columns
    kept: dict[str, Any] = {
        name: CODES[name][int(col[name][0])] if name in CODES else int(col[name][0])
        for name in KEPT
        if name not in THOUSANDTHS or col[name][0]
    }
    kept |= {name: int(col[name][0]) / 1000 for name in THOUSANDTHS if name in kept}
    space = StrategySpace.of(
        model, strategy.devices, int(col["global_batch"][0]), SCHEDULES, kept["precision"], fixed=kept
    )
    frames, inner = _choices(space, col)
    data, shard = space.frames[:, FRAME.index("data")], int(col["shard"][0])
    found: list[tuple[Configurations, Ints]] = []
    for rows in {0: 0, shard: 0, **dict.fromkeys(divisors(strategy.devices)[1:])} if shard else (0,):
        here, other = replace(space, said={**space.said, "shard": rows}), rows != shard
        near = (frames[:, None] + inner + other <= MOST) & here.live(np.arange(len(frames)))
        if other:  # rows of all replicas, said or not, are one strategy: in the words of what was asked
            near &= (data != (rows or shard))[:, None]
        at, inside = np.nonzero(near)
        found += _with_layers_again(here.columns(at, 0, inside), frames[at] + inner[inside] + other, col)
    return Configurations(
        {name: np.concatenate([one.columns[name] for one, _ in found]) for name in col}
    ), np.concatenate([choices for _, choices in found])


def _with_layers_again(some: Configurations, choices: Ints, asked: Any) -> Iterator[tuple[Configurations, Ints]]:
    """Yield strategies with as many layers computed again as were asked for, then with all of them, and their choices.

    Where another thing is computed again it is so in all layers.
    """
    layers = int(asked["recompute_layers"][0])
    alike = some.columns["recompute"] == asked["recompute"][0]
    if layers == ALL or not alike.any():
        yield some, choices
        return
    same = some[alike]
    yield Configurations({**same.columns, "recompute_layers": np.full(len(same), layers)}), choices[alike]
    more = choices + alike
    yield some[more <= MOST], more[more <= MOST]


def _choices(space: StrategySpace, asked: Any) -> tuple[Ints, Ints]:
    """In how many choices frames, [frames], and what is inside them, [inside], differ from what is asked for."""

    def differs(name: str) -> np.ndarray:
        return space.frames[:, FRAME.index(name)] != asked[name][0]

    degrees = np.sum([differs(name) for name in BLOCKS], axis=0)
    frames = np.maximum(degrees - 1, 0) + (differs("schedule") | differs("interleave"))
    for name in ALONE:
        frames = frames + differs(name)
    recompute, zero, fsdp = (asked[name][0] for name in ("recompute", "zero", "fsdp"))
    inner = [int(r != recompute) + int((z, f) != (zero, fsdp)) for r, z, f in INSIDE]
    return frames, np.array(inner)


def _said(asked: Strategy, one: Strategy) -> str:
    """What one says otherwise than what was asked for."""
    return " ".join(
        _field_text(name, getattr(one, name)) for name in FIELDS if getattr(one, name) != getattr(asked, name)
    )


def _field_text(name: str, value: object) -> str:
    return f"{name}={str(value).lower()}"
