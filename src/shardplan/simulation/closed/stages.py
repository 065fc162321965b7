"""What a chunk of layers takes, and what comes once a step: gathered parameters, reduced gradients, the update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardplan.hardware.level import DeviceSpec
from shardplan.hardware.prices.kernels import stream_seconds
from shardplan.simulation.closed.chunk_kinds import ChunkKinds
from shardplan.simulation.closed.collectives import CollectivePrices, Group
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.element_bytes import cast_bytes, element_bytes
from shardplan.simulation.closed.factored_sums import IN_STEPS, UPDATE
from shardplan.simulation.closed.kernel_classes import with_kernels
from shardplan.simulation.closed.numbers import LayerCost, whole_over_context
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.part_seconds import (
    at_once,
    copies,
    gradient_seconds,
    is_halved,
    returns,
    runs_beside,
    several_chunks,
)
from shardplan.simulation.closed.pass_overlap import PassWork, beside_moves, pass_seconds
from shardplan.simulation.closed.scheduled_steps import StageMessages
from shardplan.simulation.closed.work import BACKWARD, FORWARD
from shardplan.strategy.strategy import SHARING

Floats = np.ndarray
Ints = np.ndarray
# The update reads state, gradient and parameter, and writes state and parameter (adam; arXiv 1412.6980).
_PASSES = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class ShardedState:
    """What is dealt out to replicas, or reduced over them: parameters, gradients, state."""

    c: Configurations
    cost: LayerCost
    collectives: CollectivePrices
    p: Parameters
    replicas: Floats  # over which gradients are summed, and state is dealt out
    few: Floats  # of experts' parameters
    alike: Group
    apart: Group  # the same, of experts' parameters
    across: Group  # such groups, over which what each has summed is summed once a step (HSDP)

    @staticmethod
    def of(c: Configurations, cost: LayerCost, collectives: CollectivePrices, p: Parameters) -> ShardedState:
        """Read who has copies."""
        col = c.columns
        strides = c.strides()
        alike: list[tuple[Floats, Floats]] = []
        apart: list[tuple[Floats, Floats]] = []
        for axis, sizes in (("context", col["context"]), ("data", c.sharing)):
            size, experts = sizes.astype(float), cost.degrees.get(SHARING[axis], 1.0)
            alike.append((size, strides[axis]))
            apart.append((size / experts, strides[axis] * experts))
        replicas, few = copies(c, cost)
        across = [((col["data"] // c.sharing).astype(float), strides["data"] * c.sharing)]
        return ShardedState(c, cost, collectives, p, replicas, few, alike, apart, across)

    def _collective(self, summed: bool, whole: bool, rows: Mapping[str, Floats], width: Floats) -> Floats:
        """Seconds for each part, [runs + 2, n]: what all have alike, then experts, which fewer replicas have.

        A gradient that devices of a context make whole, as of experts whose tokens they gathered, is summed over the
        other replicas alone: of what is dealt out each takes its part first, and of all where gathering it behind takes
        less time.
        """
        found: Floats = np.zeros((1, len(self.c)))
        for kind, group in (("parameters", self.alike), ("experts", self.apart)):
            elements, (context, *others) = rows.get(kind), group
            if elements is None:
                continue
            made = rows.get(whole_over_context(kind)) if summed else None
            if made is not None:
                elements = elements - made
                summing, nbytes = self.collectives.lines(True, whole, others), made * width
                reduced = summing.seconds(nbytes / context[0])
                if whole:
                    gathering = self.collectives.lines(False, True, [context])
                    reduced = np.minimum(summing.seconds(nbytes), reduced + gathering.seconds(nbytes))
                found = found + reduced
            found = found + self.collectives.lines(summed, whole, group).seconds(elements * width)
        return found

    def gather_seconds(self, phase: int) -> Floats:
        """Return the seconds in which a microbatch gathers the parameters of each part, [runs + 2, n].

        A table whose rows are read before the layers is not gathered again for its gradient, but for what is read
        behind them too.
        """
        col = self.c.columns
        dealt = col["fsdp"] | (col["zero"] == 3)
        found = self._collective(False, True, self.cost.rows, element_bytes(self.c).parameter) * dealt
        copied = self.cost.rows["copies"].any(axis=0)
        if phase == BACKWARD:
            found = found * ~(col["fsdp"] & (col["zero"] == 2))  # what stays gathered from the forward pass
            found[-1] += found[-2] * copied
            found[-2] = 0.0
        else:
            found[-1] += found[-2] * (copied & several_chunks(self.c))
        return found

    def reduce_seconds(self, device: DeviceSpec) -> Floats:
        """Return the seconds in which a microbatch reduces the gradients of each part, [runs + 2, n].

        What is reduced is added, beside computation, to what there is.
        """
        col, rows, size = self.c.columns, self.cost.rows, element_bytes(self.c)
        zero: Floats = np.zeros((1, len(self.c)))
        pairs = zip(("parameters", "experts"), (self.replicas, self.few), strict=True)
        own = sum((rows.get(kind, zero) / count * (count > 1) for kind, count in pairs), zero)
        added = own * (size.summed + 2 * size.gradient) * (self.c.microbatches > 1)
        seconds = self._collective(True, False, rows, size.summed) + stream_seconds(added, with_kernels(device, self.p))
        # Two chunks that read a parameter each reduce what they find.
        seconds[-1] += seconds[-2] * (self.cost.rows["copies"].any(axis=0) & several_chunks(self.c))
        return seconds * (col["fsdp"] | (col["zero"] >= 2))

    def _row_seconds(self, apart: np.ndarray) -> Floats:
        """Return the seconds in which rows of replicas sum what each has found in a step, [runs + 2, n].

        Each replica sums its part where gradients are dealt out by then, which `apart` says, bool [n].
        """
        found: Floats = np.zeros((1, len(self.c)))
        if (self.c.columns["shard"] == 0).all():
            return found
        size, layered = element_bytes(self.c), self.c.columns["fsdp"] | (self.c.columns["zero"] >= 2)
        width, lines = np.where(layered, size.gradient, size.summed), self.collectives.lines(True, True, self.across)
        for kind, count in (("parameters", self.replicas), ("experts", self.few)):
            if kind in self.cost.rows:
                found = found + lines.seconds(self.cost.rows[kind] / np.where(apart, count, 1.0) * width)
        return found

    def _on_ranks(self, kinds: ChunkKinds, values: Floats) -> Floats:
        """Sums over the chunks that a rank computes, [combinations, n] of [kinds, n]."""
        return np.einsum("pkn,kn->pn", kinds.ranks, values)

    def _copied_rows(self) -> dict[str, Floats]:
        """The elements of parameters that two chunks read, [n], in each row of what is before the layers."""
        copies = self.cost.rows["copies"].max(axis=0) * several_chunks(self.c)
        found = {"parameters": copies}
        if (made := self.cost.rows.get(whole_over_context("parameters"))) is not None:
            found[whole_over_context("parameters")] = np.where(made[-2] >= copies, copies, 0.0)
        return found

    def copied_seconds(self, kinds: ChunkKinds, backward: Floats, device: DeviceSpec) -> Floats:
        """Return the seconds in which a parameter that two chunks read waits for its gradient, and goes back, [n].

        The last stage sends its gradient when it is done, while the stages before it run back (`backward`, of each
        part in a microbatch, [runs + 2, n]): where gradients of parameters are made apart, and microbatches fill the
        pipeline, no stage is left to do so.
        The first one adds it to its own, sums that over replicas, updates, and sends the parameter. Either way each
        replica sends its part where the others gather it in less time. A schedule that turns at the last rank has both
        in one.
        """
        col, size = self.c.columns, element_bytes(self.c)
        copied = self._copied_rows()
        copies, table = copied["parameters"], {name: elements[None] for name, elements in copied.items()}
        if not copies.any():
            return np.zeros(len(self.c))
        layered = col["fsdp"] | (col["zero"] >= 2)
        dealt = (col["zero"] > 0) | layered
        whole, part = (self._collective(True, x, table, size.summed)[0] for x in (True, False))
        summed = np.where(dealt & runs_beside(self.c), part, whole) * ~layered
        gathered = self._collective(False, True, table, size.parameter)[0] * dealt
        joined = 3 * size.gradient * copies / np.where(layered, self.replicas, 1.0)
        summed = summed + stream_seconds(joined, with_kernels(device, self.p))
        pipeline = np.where(returns(self.c), 1, col["pipeline"])
        if (pipeline == 1).all():
            return summed + gathered * ~(col["fsdp"] | (col["zero"] == 3))
        lines = self.collectives.message_lines(self.c.strides()["pipeline"], pipeline, across=True)
        chunk = (kinds.chunks * kinds.sums(backward)).sum(axis=0) / (col["pipeline"] * col["interleave"])
        behind = (pipeline - 1) * chunk * (~is_halved(self.c) | (self.c.microbatches < pipeline))

        def moved(nbytes: Floats, beside: Floats, parts: Floats) -> Floats:
            each, one = (lines.seconds(nbytes / over) for over in (1.0, self.replicas))
            return np.where(parts, one, np.minimum(each, one + beside))

        around = part + self._collective(False, True, table, size.summed)[0]
        late = np.maximum(0.0, moved(copies * size.summed, around, layered) - behind)
        kept = col["fsdp"] | (col["zero"] == 3)
        there = self._collective(False, True, table, size.parameter)[0]
        return late + summed + gathered * ~kept + moved(copies * size.parameter, there, kept)

    def with_contention(self, work: PassWork, phase: int, device: DeviceSpec, casts: Floats | bool = False) -> PassWork:
        """Return a pass beside whose moves products and attention have fewer processors.

        `casts`: whether gradients are cast in it, which only streams.
        """
        streamed = gradient_seconds(self.c, self.cost, self.p, device) * casts
        slowed = self.cost.on_processors(phase) * np.maximum(0.0, work.kernels - streamed)
        return beside_moves(work, slowed, device.processors)

    def factored_seconds(self, kinds: ChunkKinds) -> Floats:
        """Return the seconds in which updates by means along sides sum them over devices, [n]; see `factored_sums`."""
        col, rows, there = self.c.columns, self.cost.rows, kinds.counts > 0
        if self.c.splits:  # two rows of layers have one stack of parameters
            there[1:-2:2] &= ~there[:-2:2]
        dealt, found = (col["zero"] > 0) | col["fsdp"], np.zeros((len(kinds.ranks), len(self.c)))
        tensor: Group = [(col["tensor"].astype(float), self.c.strides()["tensor"])]
        for over, group in {"tensor": tensor, "replicas": self.alike, "both": [*self.alike, *tensor]}.items():
            for state, mine in (("whole", ~dealt), ("dealt", dealt)):
                if (each := rows.get(f"sums over {over} {state}")) is None:
                    continue
                many = np.einsum("rkn,rn->kn", there * 1.0, each)
                nbytes = kinds.sums(rows[f"summed over {over} {state}"]) / np.maximum(many, 1.0)
                found = found + self._on_ranks(
                    kinds, many * mine * self.collectives.lines(True, True, group).seconds(nbytes)
                )
        return found.max(axis=0)

    def stepwise_bytes(self, kinds: ChunkKinds) -> Floats:
        """Return the bytes that updates in several kernels read and write beyond those in one, on a rank, [n]."""
        col, size, shares = self.c.columns, element_bytes(self.c, self.cost.moments), self.replicas
        dealt = (col["zero"] > 0) | col["fsdp"]
        more = size.gradient + IN_STEPS - _PASSES * size.state - size.parameter * ~size.has_master
        found: Floats = np.zeros(len(self.c))
        for state, part in (("whole", ~dealt * 1.0), ("dealt", dealt / shares)):
            if (elements := self.cost.rows.get(f"summed over {UPDATE} {state}")) is not None:
                found = found + self._on_ranks(kinds, kinds.sums(elements)).max(axis=0) * part * more
        return found

    def once(self, kinds: ChunkKinds, device: DeviceSpec, forward: Floats, backward: Floats) -> Floats:
        """Return the seconds of what comes once a step: gradients and parameters that nothing hides, and the update.

        `forward` is of the kernels of each part in a microbatch, [runs + 2, n], `backward` of those beside which
        gradients are made: they may hide what moves once.
        """
        col, rows, size = self.c.columns, self.cost.rows, element_bytes(self.c, self.cost.moments)
        # A parameter that two chunks read is summed and gathered when both have their gradients: `copied_seconds`.
        table = self._copied_rows()
        own = {**rows, **{name: rows[name].copy() for name in table}}
        for name, elements in table.items():
            own[name][-2] -= elements
        # Software that has fused attention reduces gradients while the last backward pass goes on, and gathers what it
        # has dealt out the update of in the first forward pass; before, both came behind, and gradients whole.
        early = runs_beside(self.c)
        dealt, layered = col["zero"] > 0, col["fsdp"] | (col["zero"] == 3)
        whole, part = (self._collective(True, x, own, size.summed) for x in (True, False))
        reduces = np.where(dealt & early, part, whole) * ~(layered | (col["zero"] == 2))
        reduces = reduces + self._row_seconds(layered | (col["zero"] == 2) | (dealt & early))
        gathers = self._collective(False, True, own, size.parameter) * (dealt & ~layered)
        nothing, free = np.zeros_like(forward), np.zeros(kinds.counts.shape[1:])
        chunks = col["interleave"]
        # Passes of a chunk before the next one of a rank begins: a round of the pipeline, or all microbatches.
        round_of = np.where(at_once(self.c), self.c.microbatches, np.minimum(col["pipeline"], self.c.microbatches))
        exposed: Floats = np.zeros_like(self.replicas)
        for work, back in (
            (PassWork(forward, gathers, nothing), False), (PassWork(backward, nothing, reduces), True)
        ):  # fmt: skip
            slower = self.with_contention(work, BACKWARD if back else FORWARD, device, casts=back)
            seconds, lag = pass_seconds(kinds.counts, slower, free, backward=back)
            kernels, moved = kinds.sums(work.kernels), kinds.sums(work.gathered + work.reduced)
            waited = seconds + np.maximum(0.0, lag) - kernels
            # The first chunk begins a step, and ends it: others have its pass longer, unless all ranks end at once.
            first = (kinds.counts[-2] > 0) & (kinds.chunks > 0)
            together = back & is_halved(self.c) & (col["pipeline"] > 1)
            waited = np.maximum(0.0, waited - ~(first | together) * (kernels * first).sum(axis=0))
            # One chunk waits; what others of the rank move is on its way while that one, and other ranks, compute.
            alone = np.where(kinds.ranks > 0, waited, 0.0).max(axis=1)
            moves = self._on_ranks(kinds, moved)
            later = np.maximum(0.0, moves - round_of * self._on_ranks(kinds, kernels)) / chunks
            # The others are on the way of the first microbatch, and of the last one back: each takes longer for what
            # moves beside it, of which a layer's parameters were there.
            ahead = pass_seconds(kinds.counts, slower, free - slower.gathered.max(axis=0), backward=back)[0]
            longer = kinds.sums(slower.kernels) if back else ahead
            on_way = ((kinds.chunks - first) * np.maximum(0.0, longer - kernels)).sum(axis=0) * ~together
            exposed = exposed + np.where(early, alone + (chunks - 1) * later * back + on_way, moves)
        shares = np.where((col["zero"] > 0) | col["fsdp"], self.replicas, 1.0)
        few = np.where((col["zero"] > 0) | col["fsdp"], self.few, 1.0)
        owned = {k: self._on_ranks(kinds, kinds.sums(rows[k])) for k in ("parameters", "experts") if k in rows}
        elements = owned["parameters"] / shares + owned.get("experts", 0.0) / few
        update = elements.max(axis=0) * (_PASSES * size.state + size.gradient + size.parameter)
        layers = {k: np.concatenate([rows[k][:-2], np.zeros_like(rows[k][-2:])]) for k in owned}
        cast = sum((self._on_ranks(kinds, kinds.sums(x)) for x in layers.values()), np.zeros(1)).max(axis=0)
        update = update + cast * cast_bytes(self.c) + self.stepwise_bytes(kinds)
        copied = self.copied_seconds(kinds, backward, device)
        sums = self.factored_seconds(kinds)
        return exposed.max(axis=0) + copied + sums + stream_seconds(update, with_kernels(device, self.p))


def sent(c: Configurations, cost: LayerCost, collectives: CollectivePrices) -> StageMessages:
    """Return the seconds of messages from stages to the next; 0 where there is one stage.

    Each of a tensor group sends its part, and what is not sharded is gathered behind (arXiv 2104.04473, 4.1), or each
    sends all, where that takes less.
    """
    strides, pipeline = c.strides(), c.columns["pipeline"]
    if (pipeline == 1).all():
        return StageMessages(np.zeros(len(c)), np.zeros(len(c)), np.ones(len(c)))
    parts = np.where(c.columns["sequence_parallel"], 1, c.columns["tensor"])
    gathered = collectives.lines(False, True, [(parts, strides["tensor"])]).seconds(cost.carried) * (pipeline > 1)
    inside, step = max(collectives.fabric.topology.strides[-2:]), np.maximum(strides["pipeline"], 1)
    together = np.maximum(inside // step, 1)
    aligned = (inside % step == 0) & (pipeline % together == 0)  # else some pipelines leave a unit between others
    together = np.where(aligned & (c.columns["interleave"] == 1), together, 1)

    def seconds(stages: Ints) -> Floats:
        message = collectives.message_lines(strides["pipeline"], stages)
        return np.minimum(message.seconds(cost.carried / parts) + gathered, message.seconds(cost.carried))

    near = seconds(np.where(together > 1, np.minimum(together, pipeline), pipeline))
    if together.ndim > 1:  # no order of axes is said: none of their messages takes less
        return StageMessages(near, near, np.ones(len(c)))
    return StageMessages(seconds(pipeline), near, together)
