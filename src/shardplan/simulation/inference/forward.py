"""What the stages of a forward step take, and what bytes it has, for many strategies of one number of stages.

What comes behind the layers, the last norm and the head, is apart: of a prompt only its last position has use for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardplan.hardware.prices.kernels import stream_seconds
from shardplan.simulation.closed.chunk_kinds import layers_of
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import SPREAD, ClosedForm
from shardplan.simulation.closed.kernel_classes import with_kernels
from shardplan.simulation.closed.local_sizes import LocalSizes
from shardplan.simulation.closed.numbers import LayerCost
from shardplan.simulation.closed.pair_overlap import hidden_exchanges
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.part_seconds import layer_rows, paired_rows
from shardplan.simulation.closed.stages import sent
from shardplan.simulation.closed.work import FORWARD, LocalKernel, StepProfile

Floats = np.ndarray


class ForwardTimes(NamedTuple):
    """Seconds of a step: of each stage with the message it waits for, [n, stages]; of what comes behind, [n].

    `hidden` is what a stage takes less, [n, stages], where two groups are on it in turn and exchanges with experts
    overlap.
    """

    stages: Floats
    behind: Floats
    hidden: Floats


class ForwardBytes(NamedTuple):
    """Bytes on a device of each stage, [n, stages]: parameters, caches, what is at work; and behind layers, [n]."""

    parameters: Floats
    caches: Floats
    work: Floats
    behind: Floats


def forward_times(form: ClosedForm, c: Configurations) -> ForwardTimes:
    """Price a forward step of one group of sequences; all of `c` have one number of stages."""
    p, n, pipeline = form.parameters, len(c), int(c.columns["pipeline"][0])
    (stages, hidden), behind = np.zeros((2, n, pipeline)), np.zeros(n)
    for reading, where, one, cost in form.classes(c):
        rows = layer_rows(one, cost, p, FORWARD, form.topology.device)
        if saved := _unread_seconds(form, reading, one, cost):
            rows = _without(rows, saved, layer_rows(one, cost, _unlaunched(p), FORWARD, form.topology.device), p.order)
        counts = layers_of(reading.layers, pipeline).copy()
        counts[-1] = 0
        made = np.einsum("rc,rn->nc", counts, rows)
        if pipeline > 1:
            made[:, 1:] += sent(one, cost, form.collectives()).between(pipeline)
        stages[where], behind[where] = made, rows[-1]
        if (joint := one.columns["expert_overlap"]).any():
            mine = paired_rows(one, cost, p, FORWARD, form.topology.device)
            mine = mine.sum_parts(lambda x, counts=counts: np.einsum("rc,rn->nc", counts, x))
            hidden[where] = joint[:, None] * hidden_exchanges(mine, mine, form.topology.device.processors)[0]
    return ForwardTimes(stages, behind, hidden)


def _unread_seconds(form: ClosedForm, reading: StepProfile, c: Configurations, cost: LayerCost) -> dict[int, Floats]:
    """By run the seconds, [n], in which experts that no token of a step goes to would be read.

    Each of T tokens goes to k of E experts, any of which is then in use with 1 - (1 - k/E)^T. The program's kernels
    read all of them; where that is few, they do little else.
    """
    fields = form.model.fields
    experts = int(fields.get("experts") or 0)
    if not experts:
        return {}
    col = c.columns
    tokens = col["microbatch"] * int(fields["seq"]) * np.maximum(1, col["expert"] // col["tensor"])
    idle = (1 - int(fields["experts_per_token"]) / experts) ** tokens.astype(float)
    sizes = _sizes(reading, cost, col["microbatch"].astype(float))
    device = with_kernels(form.topology.device, form.parameters)
    found: dict[int, Floats] = {}
    for h in reading.parameters:
        if h.run >= 0 and {"experts", "ffn"} <= set(form.model.dims.get(h.name, ())):
            found[h.run] = found.get(h.run, np.zeros(len(c))) + stream_seconds(sizes.bytes(h.value) * idle, device)
    return found


def _without(rows: Floats, saved: dict[int, Floats], busy: Floats, order: float) -> Floats:
    """Rows whose device is busy for less: what hosts take of them stays."""
    hosts = np.maximum(0.0, rows**order - busy**order)
    for run, seconds in saved.items():
        busy[run] = np.maximum(0.0, busy[run] - seconds)
    return (busy**order + hosts) ** (1 / order)


def _unlaunched(p: Parameters) -> Parameters:
    return replace(p, launch=0.0, eager=0.0)


def forward_bytes(form: ClosedForm, c: Configurations, positions: int, sequences: int) -> ForwardBytes:
    """Return the bytes of a step of groups, while caches have so many positions of so many sequences a replica."""
    n, pipeline = len(c), int(c.columns["pipeline"][0])
    parameters, caches, work = (np.zeros((n, pipeline)) for _ in range(3))
    behind = np.zeros(n)
    for reading, where, _, cost in form.classes(c):
        counts = layers_of(reading.layers, pipeline)
        sizes = _sizes(reading, cost, c.columns["microbatch"][where].astype(float))
        every = _sizes(reading, cost, np.full(len(where), float(sequences)))
        rows = np.zeros((len(counts), len(where)))
        for h in reading.parameters:
            rows[_row(h.run)] += sizes.bytes(h.value)
        rows[-1] += _tied(form, reading, sizes) * (pipeline > 1)
        parameters[where] = np.einsum("rc,rn->nc", counts, rows)
        rows = np.zeros((len(counts), len(where)))
        share = positions / form.model.fields["cache"]
        for h in reading.kept:
            rows[_row(h.run)] += every.bytes(h.value) * share
        caches[where] = np.einsum("rc,rn->nc", counts, rows)
        rows = np.zeros((len(counts), len(where)))
        for k in reading.kernels:
            rows[_row(k.run)] = np.maximum(rows[_row(k.run)], _made(k, reading, sizes))
        has = (counts[:-1] > 0)[:, :, None]
        work[where] = ((rows[:-1, None] * has).max(axis=0) + cost.carried).T
        behind[where] = rows[-1]
    return ForwardBytes(parameters, caches, work, behind)


def _row(run: int) -> int:
    """The row of a run: layers from 0 on, -2 before them, -1 behind."""
    return run if run >= 0 else -3 - run


def _sizes(reading: StepProfile, cost: LayerCost, sequences: Floats) -> LocalSizes:
    return LocalSizes(cost.degrees, sequences, reading.batch, SPREAD, cost.slots)


def _made(k: LocalKernel, reading: StepProfile, sizes: LocalSizes) -> Floats:
    """The bytes that a kernel reads and writes, but for parameters and caches."""
    kept = {h.value for h in reading.kept}
    values = (v for v in k.values if v not in kept and any(e.batch for e in v.extents))
    return sum((sizes.bytes(v) for v in values), np.asarray(0.0))


def _tied(form: ClosedForm, reading: StepProfile, sizes: LocalSizes) -> Floats | float:
    """The bytes of a table that is the head, too, and so on the last stage as well."""
    if not form.model.fields.get("tied"):
        return 0.0
    return sum((sizes.bytes(h.value) for h in reading.parameters if h.name == "embed"), np.asarray(0.0))
