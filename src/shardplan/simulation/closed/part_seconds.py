"""What a device and its host take for each part of a pass, and how schedules order passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardplan.hardware.level import DeviceSpec
from shardplan.hardware.prices.kernels import stream_seconds
from shardplan.simulation.closed.chunk_kinds import AT_ONCE, ChunkKinds
from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.closed.element_bytes import element_bytes
from shardplan.simulation.closed.kernel_classes import with_kernels
from shardplan.simulation.closed.numbers import PHASES, LayerCost
from shardplan.simulation.closed.pair_overlap import PairedPass
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.work import BACKWARD, FORWARD
from shardplan.strategy.schedules.flight_peaks import equivalent_microbatches
from shardplan.strategy.schedules.table import GENERATORS
from shardplan.strategy.strategy import NARROW, SHARING

Floats = np.ndarray
# Of a movement in four parts that run beside a product the first has nothing to run beside.
EXPOSED = 0.25
MOVING = ("moves", "again moves", "early", "beside")  # rows of what movements take, and hide


def overlapped(c: Configurations) -> Floats:
    """Return where movements of layers run beside products: where it is said, and with narrow products, bool [n].

    Narrow products outside of FSDP are those of Transformer Engine, whose recipes overlap them.
    """
    narrow = np.isin(c.columns["precision"], [CODES["precision"].index(name) for name in NARROW])
    return c.columns["tensor_overlap"] | (narrow & ~c.columns["fsdp"])


def exposed_share(c: Configurations) -> Floats:
    """Return what part of movements of layers has nothing to run beside, [n]: all of it, unless they are overlapped."""
    return 1 - (1 - EXPOSED) * overlapped(c)


def runs_beside(c: Configurations) -> Floats:
    """Return whether movements run beside what does not wait for them, bool [n]: in software with fused attention."""
    return c.columns["attention"] != CODES["attention"].index("unfused")


def is_halved(c: Configurations) -> Floats:
    """Return where schedules make gradients of parameters apart from the rest of a backward pass, bool [n]."""
    return np.isin(c.columns["schedule"], _halved_codes())


def at_once(c: Configurations) -> Floats:
    """Return where all forward passes are before all that is backward, bool [n]."""
    return np.isin(c.columns["schedule"], [CODES["schedule"].index(name) for name in AT_ONCE])


def apart_share(c: Configurations) -> Floats:
    """Return what part of microbatches has passes that follow their like, where they are halved, [n].

    Once a zero-bubble schedule runs steadily, a forward pass and the halves of a backward pass come by turns; before
    that, and in the end, they do not (arXiv 2401.10241, figures 2 and 3).
    """
    found, col = np.zeros(len(c)), c.columns
    where = np.flatnonzero(is_halved(c) & (col["pipeline"] > 1))
    keys = np.stack([*(col[name][where] for name in ("schedule", "pipeline", "interleave")), c.microbatches[where]])
    distinct, back = np.unique(keys, axis=1, return_inverse=True)
    each = [passes_apart(CODES["schedule"][code], *rest) for code, *rest in distinct.T.tolist()]
    found[where] = np.array(each)[back.reshape(-1)]
    return found


@lru_cache(maxsize=4096)
def passes_apart(name: str, ranks: int, interleave: int, microbatches: int) -> float:
    """Return the part of a schedule's forward passes that come not between W and I, in the mean over ranks.

    >>> passes_apart("zb-h1", 4, 1, 16), passes_apart("zb-h2", 4, 1, 16), passes_apart("v-half", 4, 2, 16)
    (0.25, 0.4375, 0.7734375)
    """
    few = equivalent_microbatches(name, ranks, microbatches)
    if few == microbatches:
        return _count_apart(name, ranks, interleave, few) / few
    half, whole = (_count_apart(name, ranks, interleave, n) for n in (few // 2, few))
    return (whole + (whole - half) * (microbatches - few) / (few - few // 2)) / microbatches


def _count_apart(name: str, ranks: int, interleave: int, microbatches: int) -> float:
    """How many microbatches a chunk runs forward not between W and I, in the mean over chunks."""
    rows = GENERATORS[name].rows(ranks, microbatches, interleave)
    kinds = ["".join(str(leaf.kind) for action in row for leaf in action.leaves) for row in rows]
    return microbatches - sum(row.count("WFI") for row in kinds) / (ranks * interleave)


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
    held = {**rows, "parameters": rows.get("parameters", zero) + rows["copies"] * several_chunks(c)}
    for kind, count in zip(("parameters", "experts"), copies(c, cost), strict=True):
        nbytes = nbytes + held.get(kind, zero) * np.where(reduced & (count > 1), cast, own)
    return np.asarray(stream_seconds(nbytes, with_kernels(device, p)))


def joined_seconds(c: Configurations, cost: LayerCost) -> Floats:
    """Return the seconds that a microbatch is spared in which two chunks read a parameter, each part, [runs + 2, n].

    Each adds what it finds to a sum of its own, and the two sums are added once a step, not in every microbatch.
    """
    return cost.rows.get("joined gradients", np.zeros(1)) * several_chunks(c)


def weight_rows(c: Configurations, cost: LayerCost, p: Parameters, device: DeviceSpec) -> Floats:
    """Return the seconds of a backward pass that make gradients of parameters, and may come later, [runs + 2, n]."""
    moved = cost.rows.get("moves of gradients", 0.0) * exposed_share(c)
    return cost.rows.get("gradients", 0.0) + moved - joined_seconds(c, cost) + gradient_seconds(c, cost, p, device)


def layer_rows(c: Configurations, cost: LayerCost, p: Parameters, phase: int, device: DeviceSpec) -> Floats:
    """Return the seconds of a microbatch in each part, [runs + 2, n]: of `device`, or of its host."""
    busy, host = _device_and_host(c, cost, p, phase, device)
    return (busy**p.order + host**p.order) ** (1 / p.order)


def pass_rows(
    c: Configurations, kinds: ChunkKinds, cost: LayerCost, p: Parameters, device: DeviceSpec
) -> tuple[Floats, Floats]:
    """Return the seconds of a microbatch in each part, forward and back, [runs + 2, n] each.

    A host of software with fused attention waits for nothing: where kernels of one part are short, it catches up while
    those of others run, forward or back, unless all forward passes come first. On several ranks parts are not all of
    one. Software of steps keeps its host and its device apart by `Parameters.order`.
    """
    rows = [_device_and_host(c, cost, p, phase, device) for phase in (FORWARD, BACKWARD)]
    late = [host - busy for busy, host in rows]  # how far the host is behind
    apart, several = at_once(c), c.columns["pipeline"] > 1
    many = np.einsum("rkn,kn->rn", kinds.counts, kinds.chunks)

    def left(values: Sequence[Floats]) -> Floats:
        """What of some parts is left where they make up for each other, as a part of what is late."""
        whole, some = sum(values), sum(np.maximum(0.0, x) for x in values)
        each = [np.where(several, x, sum(many * x)) for x in (whole, some)]  # row by row, however many columns
        return np.divide(np.maximum(0.0, each[0]), each[1], out=np.zeros_like(each[1]), where=each[1] > 0)

    both, found = left(late), list[Floats]()
    for (busy, host), x in zip(rows, late, strict=True):
        waited = busy + np.maximum(0.0, x) * np.where(apart, left([x]), both)
        found.append(np.where(runs_beside(c), waited, (busy**p.order + host**p.order) ** (1 / p.order)))
    return found[0], found[1]


def _device_and_host(
    c: Configurations, cost: LayerCost, p: Parameters, phase: int, device: DeviceSpec
) -> tuple[Floats, Floats]:
    """The seconds of a microbatch in each part of a device, and of its host, [runs + 2, n] each."""
    col, rows, name = c.columns, cost.rows, PHASES[phase]
    zero: Floats = np.zeros((len(next(iter(rows.values()))), len(c)))
    moves = exposed_share(c)
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
        # A gradient is added to what there is by a kernel of each parameter; in `eager` those of all kernels are.
        launches = launches + rows.get("held", zero) * runs_beside(c)
        parts = col["loss"] == CODES["loss"].index("chunked")
        busy = busy + parts * rows.get("again of a loss", zero)
        # What a microbatch finds is cast, and where it is the replica's own, added to what there is.
        added = gradient_seconds(c, cost, p, device)
        busy = busy + added - joined_seconds(c, cost)
        # What a product sums is on its way while gradients of parameters are made, unless those come later; and what
        # waits for nothing, beside all that is left.
        summing = rows.get("beside gradients", zero) * ~is_halved(c)
        apart = is_halved(c)
        left = rows.get("compute backward", zero) + np.where(apart, -rows.get("gradients", zero), added) - summing
        beside = moves * (summing + np.minimum(rows.get("early", zero), left)) * runs_beside(c)
    busy = busy + np.maximum(0.0, moved - beside)
    issue = np.where(col["attention"] == CODES["attention"].index("unfused"), p.eager, p.launch)
    return busy, launches * issue


def paired_rows(c: Configurations, cost: LayerCost, p: Parameters, phase: int, device: DeviceSpec) -> PairedPass:
    """Return what each part of a pass computes and exchanges, [runs + 2, n] each, as `layer_rows` has it."""
    still = {name: x for name, x in cost.rows.items() if not name.startswith(MOVING)}
    kernels = layer_rows(c, replace(cost, rows=still), p, phase, device)
    zero: Floats = np.zeros_like(kernels)
    exchanged = cost.rows.get(f"exchanges {PHASES[phase]}", zero)
    if phase == BACKWARD:
        full = np.zeros(zero.shape, dtype=bool)
        full[:-2] = c.recompute_codes(len(zero) - 2) == CODES["recompute"].index("full")
        needed, rest = (cost.rows.get(f"again exchanges {which}", zero) for which in ("needed", "rest"))
        exchanged = exchanged + full * (needed + rest * ~c.columns["fsdp"])
    return PairedPass(kernels, cost.on_processors(phase) * kernels, exchanged * exposed_share(c))
