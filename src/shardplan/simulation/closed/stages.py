"""What a chunk of layers takes, and what comes once a step: gathered parameters, reduced gradients, the update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardplan.hardware.level import DeviceSpec
from shardplan.hardware.prices.kernels import stream_seconds
from shardplan.simulation.closed.chunk_kinds import AT_ONCE, ChunkKinds
from shardplan.simulation.closed.collectives import CollectivePrices, Group
from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.closed.element_bytes import cast_bytes, element_bytes
from shardplan.simulation.closed.factored_sums import IN_STEPS, UPDATE
from shardplan.simulation.closed.kernel_classes import with_kernels
from shardplan.simulation.closed.numbers import PHASES, LayerCost, whole_over_context
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.pass_overlap import PassWork, beside_moves, pass_seconds
from shardplan.simulation.closed.work import BACKWARD, FORWARD
from shardplan.strategy.schedules.table import GENERATORS
from shardplan.strategy.strategy import NARROW, SHARING

Floats = np.ndarray
# The update reads state, gradient and parameter, and writes state and parameter (adam; arXiv 1412.6980).
_PASSES = 2.0
# Of a movement in four parts that run beside a product the first has nothing to run beside.
EXPOSED = 0.25


def overlapped(c: Configurations) -> Floats:
    """Return where movements of layers run beside products: where it is said, and with narrow products, bool [n].

    Narrow products outside of FSDP are those of Transformer Engine, whose recipes overlap them.
    """
    narrow = np.isin(c.columns["precision"], [CODES["precision"].index(name) for name in NARROW])
    return c.columns["tensor_overlap"] | (narrow & ~c.columns["fsdp"])


def runs_beside(c: Configurations) -> Floats:
    """Return whether movements run beside what does not wait for them, bool [n]: in software with fused attention."""
    return c.columns["attention"] != CODES["attention"].index("unfused")


def is_halved(c: Configurations) -> Floats:
    """Return where schedules make gradients of parameters apart from the rest of a backward pass, bool [n]."""
    return np.isin(c.columns["schedule"], _halved_codes())


def at_once(c: Configurations) -> Floats:
    """Return where all forward passes are before all that is backward, bool [n]."""
    return np.isin(c.columns["schedule"], [CODES["schedule"].index(name) for name in AT_ONCE])


def several_chunks(c: Configurations) -> Floats:
    """Return where layers are cut into chunks, so that what is before them is apart from what is behind, bool [n]."""
    return c.columns["pipeline"] * c.columns["interleave"] > 1


def returns(c: Configurations) -> Floats:
    """Return where the last chunk is of the first rank, as in schedules that turn at the last one, bool [n]."""
    return np.isin(c.columns["schedule"], _returning_codes())


@lru_cache(maxsize=1)
def _returning_codes() -> tuple[int, ...]:
    found: list[int] = []
    for code, name in enumerate(CODES["schedule"]):
        made = GENERATORS[name]
        first, *_ = made.rows(2, 4, made.chunks)
        found += [code] * ({leaf.stage for action in first for leaf in action.leaves} >= {0, 2 * made.chunks - 1})
    return tuple(found)


@lru_cache(maxsize=1)
def _halved_codes() -> tuple[int, ...]:
    found: list[int] = []
    for code, name in enumerate(CODES["schedule"]):
        made = GENERATORS[name]
        rows = made.rows(2, 4, made.chunks)
        kinds = {leaf.kind for row in rows for action in row for leaf in action.leaves}
        found += [] if "B" in kinds else [code]
    return tuple(found)


def copies(c: Configurations, cost: LayerCost) -> tuple[Floats, Floats]:
    """Return to how many devices a parameter may be dealt out, and to how many an expert's, [n] each."""
    alike = apart = np.ones(len(c))
    for axis, sizes in (("context", c.columns["context"]), ("data", c.sharing)):
        size = sizes.astype(float)
        alike, apart = alike * size, apart * size / cost.degrees.get(SHARING[axis], 1.0)
    return alike, apart


def gradient_seconds(c: Configurations, cost: LayerCost, p: Parameters, device: DeviceSpec) -> Floats:
    """Return the seconds in which the gradients of a microbatch are cast, or added to what there is, [runs + 2, n].

    What is reduced in every microbatch is cast alone; what has no copies is added where it is made. The gradient of the
    only microbatch stays as it was made, where it has its dtype.
    """
    rows, size, several = cost.rows, element_bytes(c), c.microbatches > 1
    zero: Floats = np.zeros((1, len(c)))
    own = (size.parameter + size.gradient * (1 + several)) * (several | (size.parameter != size.gradient))
    cast = (size.parameter + size.summed) * (size.parameter != size.summed)
    reduced = c.columns["fsdp"] | (c.columns["zero"] >= 2)
    nbytes = zero
    for kind, count in zip(("parameters", "experts"), copies(c, cost), strict=True):
        nbytes = nbytes + rows.get(kind, zero) * np.where(reduced & (count > 1), cast, own)
    return np.asarray(stream_seconds(nbytes, with_kernels(device, p)))


def weight_rows(c: Configurations, cost: LayerCost, p: Parameters, device: DeviceSpec) -> Floats:
    """Return the seconds of a backward pass that make gradients of parameters, and may come later, [runs + 2, n]."""
    return cost.rows.get("gradients", 0.0) + gradient_seconds(c, cost, p, device)


def layer_rows(c: Configurations, cost: LayerCost, p: Parameters, phase: int, device: DeviceSpec) -> Floats:
    """Return the seconds of a microbatch in each part, [runs + 2, n]: of `device`, or of its host."""
    col, rows, name = c.columns, cost.rows, PHASES[phase]
    zero: Floats = np.zeros((len(next(iter(rows.values()))), len(c)))
    moves = 1 - (1 - EXPOSED) * overlapped(c)
    moved = rows.get(f"moves {name}", zero) * moves
    beside = zero
    busy = rows.get(f"compute {name}", zero)
    launches = rows.get(f"launches {name}", zero)
    if phase == BACKWARD:
        again = np.zeros(zero.shape, dtype=np.int64)
        again[:-2] = c.recompute_codes(len(zero) - 2)  # only layers are computed again
        full, some, second = (again == CODES["recompute"].index(k) for k in ("full", "selective", "selective_op"))
        needed = rows.get("again needed", zero) + rows.get("again moves needed", zero) * moves
        rest = rows.get("again rest", zero) + rows.get("again moves rest", zero) * moves
        # Checkpoints of FSDP stop at the last value that is needed; those of Megatron and DeepSpeed do not.
        whole = needed + rest * ~col["fsdp"]
        attention = rows.get("attention", zero)
        # Of what is needed attention and what was moved are kept, and every second product.
        every_second = np.maximum(0.0, rows.get("again needed", zero) - attention) / 2
        busy = busy + full * whole + some * attention + second * every_second
        launches = launches + full * rows.get("again launches", zero)
        parts = col["loss"] == CODES["loss"].index("chunked")
        busy = busy + parts * rows.get("again of a loss", zero)
        # What a microbatch finds is cast, and where it is the replica's own, added to what there is.
        added = gradient_seconds(c, cost, p, device)
        busy = busy + added
        # What a product sums is on its way while gradients of parameters are made, unless those come later; and what
        # waits for nothing, beside all that is left.
        summing = rows.get("beside gradients", zero) * ~is_halved(c)
        apart = is_halved(c)
        left = rows.get("compute backward", zero) + np.where(apart, -rows.get("gradients", zero), added) - summing
        beside = moves * (summing + np.minimum(rows.get("early", zero), left)) * runs_beside(c)
    busy = busy + np.maximum(0.0, moved - beside)
    issue = np.where(col["attention"] == CODES["attention"].index("unfused"), p.eager, p.launch)
    return (busy**p.order + (launches * issue) ** p.order) ** (1 / p.order)


@dataclass(frozen=True, slots=True, eq=False)
class Dealt:
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
    def of(c: Configurations, cost: LayerCost, collectives: CollectivePrices, p: Parameters) -> Dealt:
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
        return Dealt(c, cost, collectives, p, replicas, few, alike, apart, across)

    def _collective(self, summed: bool, whole: bool, rows: Mapping[str, Floats], width: Floats) -> Floats:
        """Seconds for each part, [runs + 2, n]: what all have alike, then experts, which fewer replicas have.

        A gradient that devices of a context make whole, as of experts whose tokens they gathered, is summed over the
        other replicas alone: of what is dealt out each takes its part first.
        """
        found: Floats = np.zeros((1, len(self.c)))
        for kind, group in (("parameters", self.alike), ("experts", self.apart)):
            elements, (context, *others) = rows.get(kind), group
            if elements is None:
                continue
            made = rows.get(whole_over_context(kind)) if summed else None
            if made is not None:
                elements = elements - made
                part = made if whole else made / context[0]
                found = found + self.collectives.lines(True, whole, others).seconds(part * width)
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

    def copied_seconds(self, kinds: ChunkKinds, backward: Floats) -> Floats:
        """Return the seconds in which a parameter that the last stage reads too waits for its gradient, and goes back.

        The last stage makes its gradient first, and that is on its way while all stages run back (`backward`, of each
        part in a microbatch, [runs + 2, n]). The first one sends the parameter when it is updated: each replica sends
        its part where the others gather it in less time. A schedule that turns at the last rank has both in one.
        """
        col, size = self.c.columns, element_bytes(self.c)
        copies = self.cost.rows["copies"].max(axis=0)
        pipeline = np.where(returns(self.c), 1, col["pipeline"])
        if not np.any(copies * (pipeline > 1)):
            return np.zeros(len(self.c))
        lines = self.collectives.message_lines(self.c.strides()["pipeline"], pipeline, across=True)
        dealt = np.where(col["fsdp"] | (col["zero"] >= 2), self.replicas, 1.0)
        passes = kinds.sums(backward)
        stage = (kinds.chunks * passes).sum(axis=0) / pipeline
        late = np.maximum(0.0, lines.seconds(copies * size.summed / dealt) - pipeline * stage)
        nbytes = copies * size.parameter
        layered = col["fsdp"] | (col["zero"] == 3)
        whole, part = (lines.seconds(nbytes / over) for over in (1.0, self.replicas))
        gathered = part + self.collectives.lines(False, True, self.alike).seconds(nbytes) * ~layered
        return late + np.where(layered, part, np.minimum(whole, gathered))

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
        # Software that has fused attention reduces gradients while the last backward pass goes on, and gathers what it
        # has dealt out the update of in the first forward pass; before, both came behind, and gradients whole.
        early = runs_beside(self.c)
        dealt, layered = col["zero"] > 0, col["fsdp"] | (col["zero"] == 3)
        whole, part = (self._collective(True, x, rows, size.summed) for x in (True, False))
        reduces = np.where(dealt & early, part, whole) * ~(layered | (col["zero"] == 2))
        reduces = reduces + self._row_seconds(layered | (col["zero"] == 2) | (dealt & early))
        gathers = self._collective(False, True, rows, size.parameter) * (dealt & ~layered)
        nothing, free = np.zeros_like(forward), np.zeros(kinds.counts.shape[1:])
        chunks = col["interleave"]
        # Passes of a chunk before the next one of a rank begins: a round of the pipeline, or all microbatches.
        round_of = np.where(at_once(self.c), np.maximum(col["pipeline"], self.c.microbatches), col["pipeline"])
        exposed: Floats = np.zeros_like(self.replicas)
        for work, back in (
            (PassWork(forward, gathers, nothing), False), (PassWork(backward, nothing, reduces), True)
        ):  # fmt: skip
            slower = self.with_contention(work, BACKWARD if back else FORWARD, device, casts=back)
            seconds, lag = pass_seconds(kinds.counts, slower, free, backward=back)
            kernels, moved = kinds.sums(work.kernels), kinds.sums(work.gathered + work.reduced)
            waited = seconds + np.maximum(0.0, lag) - kernels
            # One chunk waits; what others of the rank move is on its way while that one, and other ranks, compute.
            alone = np.where(kinds.ranks > 0, waited, 0.0).max(axis=1)
            moves = self._on_ranks(kinds, moved)
            later = np.maximum(0.0, moves - round_of * self._on_ranks(kinds, kernels)) / chunks
            exposed = exposed + np.where(early, alone + (chunks - 1) * later, moves)
        shares = np.where((col["zero"] > 0) | col["fsdp"], self.replicas, 1.0)
        few = np.where((col["zero"] > 0) | col["fsdp"], self.few, 1.0)
        owned = {k: self._on_ranks(kinds, kinds.sums(rows[k])) for k in ("parameters", "experts") if k in rows}
        elements = owned["parameters"] / shares + owned.get("experts", 0.0) / few
        update = elements.max(axis=0) * (_PASSES * size.state + size.gradient + size.parameter)
        layers = {k: np.concatenate([rows[k][:-2], np.zeros_like(rows[k][-2:])]) for k in owned}
        cast = sum((self._on_ranks(kinds, kinds.sums(x)) for x in layers.values()), np.zeros(1)).max(axis=0)
        update = update + cast * cast_bytes(self.c) + self.stepwise_bytes(kinds)
        copied = self.copied_seconds(kinds, backward)
        sums = self.factored_seconds(kinds)
        return exposed.max(axis=0) + copied + sums + stream_seconds(update, with_kernels(device, self.p))
