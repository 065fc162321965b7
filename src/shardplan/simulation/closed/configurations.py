"""`Configurations`: many strategies as columns of numbers, so that they are priced together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.core.dtypes import short_name
from shardplan.errors import LayoutError, excerpt
from shardplan.strategy.held_cuts import EXPERTS_FROM
from shardplan.strategy.schedules.table import GENERATORS
from shardplan.strategy.software import ATTENTION, DISPATCH, EXPERT_PRODUCTS
from shardplan.strategy.strategy import LOSS, RECOMPUTE, Strategy

Ints = np.ndarray
Floats = np.ndarray
ALL = 2**31  # layers that are computed again where a strategy does not say how many
MOST = 2**62  # of a code that 64 bits hold
# Blocks of axes, outermost on the hardware first: who of a strategy's devices lie next to each other. `together` is no
# order: of every collective the one of all orders in which it costs least, so that no order is below it.
ORDERS = tuple(itertools.permutations(("pipeline", "data", "context", "tensor")))
TOGETHER = ("together",)
# Columns whose numbers are places in a tuple of names; None is what a strategy leaves to the model.
CODES: Mapping[str, tuple[Any, ...]] = {
    "schedule": tuple(GENERATORS),
    "recompute": RECOMPUTE,
    "context_kind": ("ulysses", "gather", "ring", "zigzag"),
    "precision": (None, "fp32", "bf16", "fp16", "fp8", "nvfp4"),
    "gradient_dtype": (None, "f16", "bf16", "f32", "f64"),
    "reduce_dtype": (None, "f16", "bf16", "f32", "f64"),
    "attention": (None, *ATTENTION),
    "loss": LOSS,
    "expert_from": tuple(EXPERTS_FROM),
    "dispatch": (None, *DISPATCH),
    "expert_products": (None, *EXPERT_PRODUCTS),
    "order": (*ORDERS, TOGETHER),
}
NUMBERS = (
    "data", "tensor", "pipeline", "context", "expert", "microbatch", "global_batch", "interleave", "zero",
    "offload_layers", "loss_chunks", "shard", "recompute_layers",
)  # fmt: skip
FLAGS = ("sequence_parallel", "fsdp", "tensor_overlap", "expert_overlap")
THOUSANDTHS = ("imbalance",)  # numbers with digits behind the point, as so many thousandths
# What a column holds where a strategy has no such field, or says nothing.
DEFAULTS: Mapping[str, int] = {**dict.fromkeys(NUMBERS, 1), **dict.fromkeys((*THOUSANDTHS, *FLAGS, *CODES), 0),
                               "zero": 0, "offload_layers": 0, "shard": 0, "recompute_layers": ALL}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Configurations:
    """Strategies of one model, as columns.

    Args:
        columns: By field of `Strategy` an array [n], int64 or bool; fields of `CODES` as places in its tuples, of
            `THOUSANDTHS` as so many.

    `Configurations.of` makes them of strategies, `strategy` one again.

    >>> c = Configurations.of([Strategy(data=2, tensor=4), Strategy(pipeline=2, global_batch=8)])
    >>> len(c), c.microbatches.tolist(), c.strategy(1).pipeline
    (2, [1, 8], 2)
    """

    columns: Mapping[str, Ints]

    @staticmethod
    def of(strategies: Iterable[Strategy]) -> Configurations:
        """Return strategies as columns; raises `LayoutError` for one that says what no column has."""
        rows = list(strategies)
        for s in rows:
            for name, plain in (("cuts", None), ("keep", ()), ("bucket", None), ("prefetch", None),
                                ("offload", False)):  # fmt: skip
                if getattr(s, name) != plain:
                    raise LayoutError(f"many strategies at once: {name}={getattr(s, name)!r}; legal is {plain!r}")
        columns: dict[str, Ints] = {}
        for name in (*NUMBERS, *FLAGS):
            said = [getattr(s, name, DEFAULTS[name]) for s in rows]
            said = [DEFAULTS[name] if x is None else x for x in said]  # no `shard` is 0: all replicas
            columns[name] = np.asarray(said, dtype=bool if name in FLAGS else np.int64)
        for name in THOUSANDTHS:
            columns[name] = np.asarray([round(1000 * (getattr(s, name) or 0)) for s in rows], dtype=np.int64)
        for name, legal in CODES.items():
            columns[name] = np.asarray(
                [_code_of_choice(name, legal, getattr(s, name, legal[0])) for s in rows], dtype=np.int64
            )
        return Configurations(columns)

    @staticmethod
    def filled(count: int, said: Mapping[str, Ints | int]) -> Configurations:
        """Return so many with columns [count], or a number for all, as said, and all else by default."""
        columns: dict[str, Ints] = {}
        for name, plain in DEFAULTS.items():
            column = np.broadcast_to(said.get(name, plain), count)
            columns[name] = column.astype(bool if name in FLAGS else np.int64)
        return Configurations(columns)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.columns["data"])

    def __getitem__(self, index: Ints | slice | Sequence[int]) -> Configurations:
        """Return some of them, by a mask, places or a slice."""
        return Configurations({name: column[index] for name, column in self.columns.items()})

    @property
    def microbatches(self) -> Ints:
        """The microbatches of a step, int64 [n]."""
        c = self.columns
        return -(-c["global_batch"] // (c["data"] * c["microbatch"]))

    @property
    def sharing(self) -> Ints:
        """The replicas in a row that state is dealt out to, int64 [n]: `shard`, or all."""
        c = self.columns
        return np.where(c["shard"] > 0, c["shard"], c["data"])

    @property
    def devices(self) -> Ints:
        """The devices of each, int64 [n]."""
        c = self.columns
        return c["data"] * c["tensor"] * c["pipeline"] * c["context"]

    def without_recompute(self) -> Configurations:
        """Return them with nothing that is computed again."""
        plain = {name: np.full(len(self), DEFAULTS[name]) for name in ("recompute", "recompute_layers")}
        return Configurations({**self.columns, **plain})

    def with_precision_of(self, fields: Mapping[str, object]) -> Configurations:
        """Return them with what a model's fields say of precision where they say nothing; gradients as parameters."""
        own, dtype = fields.get("precision"), short_name(str(fields["dtype"]))
        if own is None or own not in CODES["precision"] or dtype not in CODES["gradient_dtype"]:
            return self
        silent = self.columns["precision"] == 0
        codes = {"precision": own, "gradient_dtype": dtype}
        said = {name: np.where(silent & (self.columns[name] == 0), CODES[name].index(value), self.columns[name])
                for name, value in codes.items()}  # fmt: skip
        return Configurations({**self.columns, **said})

    @property
    def splits(self) -> bool:
        """Whether of any some layers are computed again and others not: of each run there are two kinds then."""
        return bool((self.columns["recompute_layers"] != ALL).any())

    def recompute_codes(self, runs: int) -> Ints:
        """Return what is computed again of the layers in each row of their tables, codes [rows, n].

        There is a row a run; where any `splits` two of them, of layers computed again and of those behind.
        """
        code = self.columns["recompute"]
        rows = (code, np.zeros_like(code) if self.splits else code)
        return np.stack([rows[k % 2] for k in range(runs)]) if self.splits else np.repeat(code[None], runs, axis=0)

    def order(self, k: int) -> tuple[str, ...]:
        """Return how the axes of one lie on the hardware, outermost first."""
        return CODES["order"][int(self.columns["order"][k])]

    def strides(self) -> dict[str, Floats]:
        """Return by block of axes how many devices lie between neighbours, float64 [n].

        Where any of them has no order, every block has its strides in all orders: float64 [orders, n].
        """
        orders = self.columns["order"]
        unordered = orders == len(ORDERS)
        if not unordered.any():
            return self._strides(orders)
        each = [self._strides(np.where(unordered, code, orders)) for code in range(len(ORDERS))]
        return {block: np.stack([one[block] for one in each]) for block in ORDERS[0]}

    def _strides(self, orders: Ints) -> dict[str, Floats]:
        found: dict[str, Floats] = {block: np.ones(len(self)) for block in ORDERS[0]}
        for code in np.flatnonzero(np.bincount(orders)):
            at = slice(None) if (orders == code).all() else np.flatnonzero(orders == code)
            inside: Floats | float = 1.0
            for block in reversed(CODES["order"][code]):
                found[block][at] = inside
                inside = inside * self.columns[block][at]
        return found

    def strategy(self, k: int) -> Strategy:
        """Return one of them; how its axes lie on the hardware is no part of it."""
        said: dict[str, Any] = {name: self.columns[name][k].item() for name in (*NUMBERS, *FLAGS)}
        said |= {name: legal[int(self.columns[name][k])] for name, legal in CODES.items() if name != "order"}
        said |= {name: int(self.columns[name][k]) / 1000 or None for name in THOUSANDTHS}
        said["shard"] = said["shard"] or None
        said["recompute_layers"] = None if said["recompute_layers"] == ALL else said["recompute_layers"]
        return Strategy(**said)


def _code_of_choice(name: str, legal: tuple[Any, ...], said: object) -> int:
    if said not in legal:
        raise LayoutError(f"many strategies at once: {name}={excerpt(said)}; legal are {', '.join(map(str, legal))}")
    return legal.index(said)


def distinct(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return a place of every distinct row of some columns of numbers from 0, and which of them each row is."""
    code, most = np.zeros(len(columns[0]), dtype=np.int64), 1
    for values in columns:
        width = int(values.max()) + 1
        if most * width > MOST:
            code = np.unique(code, return_inverse=True)[1]
            most = int(code.max()) + 1
        code, most = code * width + values, most * width
    _, places, back = np.unique(code, return_index=True, return_inverse=True)
    return places, back
