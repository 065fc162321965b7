"""`StrategySpace`: the strategies of a model on so many devices, in an order, as columns.

A frame says degrees, microbatch, schedule, interleave and what axes serve; inside it vary how its axes lie on the
hardware, recomputation and how state is dealt out. That is where bounds are worked out: nothing inside a frame changes
what its layers compute once, and no order of axes what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.core import validation
from shardplan.core.digits import nth_of_each
from shardplan.errors import ShardplanError
from shardplan.simulation.closed.configurations import CODES, ORDERS, THOUSANDTHS, TOGETHER, Configurations
from shardplan.strategy.limits import ModelLimits
from shardplan.strategy.model import Model
from shardplan.strategy.options import excess_imbalance, ulysses

Ints = np.ndarray
SCHEDULES = ("1f1b", "interleaved", "gpipe")
PAIRED = ("combined-1f1b",)  # where exchanges with experts overlap with another microbatch
RECOMPUTE = CODES["recompute"]
DEALT = ((0, False), (1, False), (2, False), (3, False), (2, True), (3, True))  # zero, fsdp
# `selective_op` is PyTorch's, and tried with FSDP alone.
INSIDE = tuple((r, z, f) for r, name in enumerate(RECOMPUTE) for z, f in DEALT if f or name != "selective_op")
_INSIDE = np.array(INSIDE, dtype=np.int64)
FRAME = ("data", "tensor", "pipeline", "context", "expert", "microbatch", "schedule", "interleave", "sequence_parallel",
         "context_kind")  # fmt: skip
INNER = ("recompute", "zero", "fsdp")  # what varies inside of a frame
ALIKE = (
    "precision",
    "attention",
    "gradient_dtype",
    "reduce_dtype",
    "tensor_overlap",
    "offload_layers",
    "loss",
    "loss_chunks",
    "shard",
    "expert_from",
    "dispatch",
    "imbalance",
    "expert_products",
    "expert_overlap",
)  # what all may have
OF_EXPERTS = (
    "expert_from",
    "dispatch",
    "imbalance",
    "expert_overlap",
)  # of those what says nothing where no devices share experts
BLOCKS = ORDERS[0]


def _orders_of(kind: int) -> tuple[int, ...]:
    """The codes of the orders that differ where only some blocks have more than one device: the first of each."""
    alive = [block for k, block in enumerate(BLOCKS) if kind >> k & 1]
    seen = {tuple(b for b in order if b in alive): k for k, order in reversed(list(enumerate(ORDERS)))}
    return tuple(sorted(seen.values()))


# By the blocks that have more than one device, as bits: the orders that differ.
KINDS = tuple(_orders_of(kind) for kind in range(1 << len(BLOCKS)))
_ORDERS = np.array([one + (-1,) * (len(ORDERS) - len(one)) for one in KINDS], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class StrategySpace:
    """Frames as columns [frames], each with the same strategies inside, on the orders of its axes.

    >>> model = Model.load("gpt", layers=4, hidden=64, heads=4, seq=16, vocab=64)
    >>> StrategySpace.of(model, 4, 8).count
    2000
    >>> StrategySpace.of(model, 4, 8, placements=True).count
    3500
    """

    frames: Ints  # int64 [frames, fields of FRAME]
    global_batch: int
    kinds: Ints  # which orders a frame has, a place in KINDS, int64 [frames]
    starts: Ints  # pairs of a frame and an order before each frame, and of all, int64 [frames + 1]
    limits: ModelLimits
    asked: np.ndarray  # which of those inside are looked at, bool [inside]
    said: Mapping[str, int]  # columns that all have alike, as `Configurations` has them

    @staticmethod
    def of(
        model: Model,
        devices: int,
        global_batch: int,
        schedules: Sequence[str] = SCHEDULES,
        precision: str | None = None,
        attention: str | None = None,
        placements: bool = False,
        fixed: Mapping[str, Any] | None = None,
    ) -> StrategySpace:
        """Enumerate what is legal; with `placements` on every order of the axes on the hardware that differs.

        Of fields that are `fixed` only the value given: those that vary here, and those of `ALIKE`.

        Degrees multiply to `devices`, also where they are no powers of two: `tensor` up to the heads, `pipeline` up to
        the layers, `context` a divisor of the sequence, `expert` a divisor of the experts and of a stage. Replicas and
        microbatches divide the global batch; chunks of several a rank divide the layers, and ranks the microbatches. A
        frame says nothing idle: `ulysses` has a key-value head for every device, `gpipe` several microbatches; what is
        idle inside of it (`live`) is counted apart.

        Raises `ShardplanError` for other schedules than those with a formula, other fields fixed, and where nothing is
        legal.
        """
        validation.whole_number("search: devices", devices, 1, kind=ShardplanError)
        validation.whole_number("search: global_batch", global_batch, 1, kind=ShardplanError)
        asked, said = _fixed_columns({"precision": precision, "attention": attention, **(fixed or {})})
        legal = PAIRED if said.get("expert_overlap") else SCHEDULES
        schedules = legal if tuple(schedules) == SCHEDULES else schedules
        schedules = schedules if not fixed or "schedule" not in fixed else (str(fixed["schedule"]),)
        for name in schedules:
            validation.choice("search: schedules", name, legal, ShardplanError)
        limits = ModelLimits.of(model, precision)
        rows = list(_frames(limits, devices, global_batch, tuple(schedules)))
        table = np.array(rows, dtype=np.int64).reshape(-1, len(FRAME))
        inner = np.ones(len(INSIDE), dtype=bool)
        for name, value in asked.items():
            if name in FRAME:
                table = table[table[:, FRAME.index(name)] == value]
            else:
                inner &= _INSIDE[:, INNER.index(name)] == value
        if any(said.get(name) for name in OF_EXPERTS):
            table = table[table[:, FRAME.index("expert")] > 1]
        if said.get("imbalance"):
            much = said["imbalance"] / 1000
            for one in excess_imbalance(limits, much, devices):
                raise ShardplanError(f"search: fixed imbalance={much:g}: {one.why}; legal is {one.legal}")
            table = table[table[:, FRAME.index("expert")] >= much]
        if said.get("shard"):
            table = table[_may_share(table, said["shard"])]
        kinds = np.zeros(len(table), dtype=np.int64)
        for k, block in enumerate(BLOCKS):
            kinds += (table[:, FRAME.index(block)] > 1) * (1 << k) * placements
        starts = np.concatenate([[0], np.cumsum(np.array([len(one) for one in KINDS])[kinds])])
        space = StrategySpace(table, global_batch, kinds, starts, limits, inner, said)
        if not space.live(np.arange(len(table))).any():
            why = "".join(f", {name}={value}" for name, value in (fixed or {}).items())
            raise ShardplanError(
                f"search: no strategy of {devices} devices, {global_batch} sequences{why} is legal: degrees multiply "
                f"to the devices, tensor up to {limits.heads} heads, pipeline up to {limits.layers} layers; context "
                f"divides {limits.sequence}, replicas and microbatches the sequences, and shard the replicas; zero and "
                "fsdp need data or context of 2 and more, shard one of them"
            )
        return space

    def live(self, frames: Ints) -> np.ndarray:
        """Return which of the strategies inside some frames have no option that does nothing: bool [n, inside]."""
        data, context = (self.frames[frames, FRAME.index(name)][:, None] for name in ("data", "context"))
        recompute, zero, fsdp = _INSIDE.T
        found = ((fsdp == 0) & (zero == 0)) | (data * context > 1)
        found &= (zero != 1) | self.limits.kept
        found &= (zero == 0) | (zero == 3) | self.limits.training
        found &= (recompute == 0) | self.limits.training
        if shard := self.said.get("shard", 0):
            found &= ((fsdp > 0) | (zero > 0)) & _may_share(self.frames[frames], shard)[:, None]
        found &= self.asked
        return found & ((recompute != RECOMPUTE.index("selective")) | self.limits.scores)

    @property
    def idle(self) -> int:
        """How many strategies have one."""
        frames = np.arange(len(self.frames))
        return int((np.diff(self.starts) * (self.asked & ~self.live(frames)).sum(axis=1)).sum())

    @property
    def inside(self) -> int:
        """How many strategies a frame has."""
        return len(INSIDE)

    @property
    def count(self) -> int:
        """How many strategies there are."""
        return int(self.starts[-1]) * int(self.asked.sum())

    @property
    def floor_order(self) -> int:
        """The code of an order that no order of a frame is below."""
        return CODES["order"].index(TOGETHER) if self.kinds.any() else 0

    def pairs(self, frames: Ints) -> tuple[Ints, Ints, Ints]:
        """Return every order of some frames: the place of the frame among them, the order's code, and the pair's place.

        Arrays [pairs], in the order of the frames.
        """
        many = self.starts[frames + 1] - self.starts[frames]
        which = np.repeat(np.arange(len(frames)), many)
        nth = nth_of_each(many)
        return which, _ORDERS[self.kinds[frames[which]], nth], self.starts[frames[which]] + nth

    def columns(self, frames: Ints, orders: Ints | int, inside: Ints | int) -> Configurations:
        """Return strategies by their frames, codes of orders and places of `INSIDE`: arrays [n], or one for all."""
        said = dict(zip((*FRAME, *INNER), (*self.frames[frames].T, *_INSIDE[inside].T), strict=True))
        own = {"order": orders, "global_batch": self.global_batch, **self.said}
        return Configurations.filled(len(frames), said | own)

    def one(self, index: int) -> Configurations:
        """Return the strategy at a place of the order."""
        pair, inside = divmod(index, len(INSIDE))
        frame = int(np.searchsorted(self.starts, pair, side="right")) - 1
        order = _ORDERS[self.kinds[frame], pair - self.starts[frame]]
        return self.columns(np.array([frame]), int(order), inside)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool):
        return int(value)
    if name in THOUSANDTHS:
        return round(1000 * validation.number(f"search: fixed {name}", value, ShardplanError, least=1.0))
    return validation.whole_number(f"search: fixed {name}", value, int(name == "shard"), kind=ShardplanError)


def _may_share(table: Ints, shard: int) -> np.ndarray:
    """Which frames have replicas that rows of `shard` deal out, and experts in such a row: bool [frames]."""
    data, expert, context, tensor = (table[:, FRAME.index(name)] for name in ("data", "expert", "context", "tensor"))
    return (data % shard == 0) & (shard * context * tensor % expert == 0)


def _fixed_columns(fields: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return what is fixed of what varies, and of what does not, as numbers; fields of `CODES` as places in them."""
    varied, alike = (*FRAME, *INNER), dict[str, int]()
    found: dict[str, int] = {}
    for name, value in fields.items():
        if name not in (*varied, *ALIKE):
            raise ShardplanError(f"search: fixed {name}={value}; legal are {', '.join((*varied, *ALIKE))}")
        if name in CODES and value not in CODES[name]:
            raise ShardplanError(f"search: fixed {name}={value}; legal are {', '.join(map(str, CODES[name]))}")
        code = CODES[name].index(value) if name in CODES else _whole(name, value)
        (found if name in varied else alike)[name] = code
    return found, alike


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _frames(limits: ModelLimits, devices: int, batch: int, schedules: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
    kinds = CODES["context_kind"]
    for tensor in (t for t in divisors(devices) if t <= limits.heads):
        for pipeline in (p for p in divisors(devices // tensor) if p <= limits.layers):
            for context in (c for c in divisors(devices // tensor // pipeline) if limits.sequence % c == 0):
                data = devices // tensor // pipeline // context
                if batch % data:
                    continue
                stage = data * context * tensor
                few = context > ulysses(limits, tensor)
                context_kinds = ("gather",) if few else ("ulysses", "gather") if context > 1 else ("ulysses",)
                for expert in (e for e in divisors(limits.experts) if stage % e == 0):
                    for microbatch in divisors(batch // data):
                        orders = _orders(limits.layers, pipeline, batch // data // microbatch, schedules)
                        for schedule, interleave in orders:
                            for parallel in (0, 1) if tensor > 1 < limits.sequence else (0,):
                                for kind in context_kinds:
                                    yield (data, tensor, pipeline, context, expert, microbatch,
                                           CODES["schedule"].index(schedule), interleave, parallel,
                                           kinds.index(kind))  # fmt: skip


def _orders(layers: int, pipeline: int, many: int, schedules: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for name in schedules:
        if name in PAIRED and pipeline == 1:
            yield from [(name, 1)] * (many > 1)
        elif name not in ("interleaved", *PAIRED):
            if name == "1f1b" or (pipeline > 1 and many > 1):
                yield name, 1
        elif pipeline > 1 and many % pipeline == 0 and layers % pipeline == 0:
            yield from ((name, v) for v in divisors(layers // pipeline) if v > 1)
