"""`refit`: the plan that moves a model's weights from one side's storage to the other's.

The unit is a pair of stored parameters that share a logical tensor: planning and coverage never loop over names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from shardplan.core.dtypes import itemsize
from shardplan.core.pattern import Messages
from shardplan.errors import LayoutError, excerpt
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import seconds as seconds_on
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import limit_of
from shardplan.movement.weights.arithmetic import evaluate_arithmetic, names_in
from shardplan.movement.weights.blocks import check_blocks, check_scaled
from shardplan.movement.weights.coverage import check_owners, covering
from shardplan.movement.weights.drops import check_drops
from shardplan.movement.weights.limits import demand_of, least_seconds
from shardplan.movement.weights.owners import FamilyMove, family_contents, move_of
from shardplan.movement.weights.reference import apply_refit
from shardplan.movement.weights.regions import RefitRegions, RegionWriter, write_regions
from shardplan.movement.weights.replicas import WeightReplicas
from shardplan.movement.weights.weights import Weights
from shardplan.notebook import notebook_html
from shardplan.plans.pricing import Where, fabric_of, where_of


@dataclass(frozen=True)  # no slots: what is worked out once is remembered
class RefitPlan:
    """What goes from every rank of `source` to every rank of `target`, for the tensors that `only` says (None: all).

    `dropped` has the logical tensors of the source that the target does not take, or not all of, as was asked for.
    Pure and deterministic: each side computes it for itself, and `hash` is equal on both.
    """

    source: Weights
    target: Weights
    only: tuple[str, ...] | None
    topology: Where | None
    memory_limit: int | None
    moves: tuple[FamilyMove, ...]
    relays: tuple[FamilyMove, ...] = ()
    dropped: tuple[str, ...] = ()

    _repr_html_ = notebook_html

    @cached_property
    def hash(self) -> str:
        """The hash of both sides and of what is moved: a plan of other degrees, configs or tables has another."""
        text = "\n".join([str(self.source), str(self.target), repr(self.only), f"relays {bool(self.relays)}"])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def _ids(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.source.devices, dtype=np.int64), np.array(self.target.devices, dtype=np.int64)

    @cached_property
    def _writer(self) -> RegionWriter:
        return RegionWriter(self.source.families, self.target.families)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The device ids of both sides, ascending."""
        return tuple(sorted({*self.source.devices, *self.target.devices}))

    def regions(self, rank: int) -> RefitRegions:
        """Return what a rank sends and receives; both ends list what goes between them in the same order.

        Raises `LayoutError` where the rank is on neither side.
        """
        if rank not in self.source.devices and rank not in self.target.devices:
            raise LayoutError(f"rank {excerpt(rank)} is on neither side; legal are the devices of source and target")
        return write_regions(self._writer, self.moves, self._ids, (self.source.starts, self.target.starts), rank)

    def passed_on(self, rank: int) -> RefitRegions:
        """Return what a rank of the target passes on, and is passed, when it has its own: from target to target.

        Both parameters are numbers in `target.names(rank)`; `move` is the number in `relays`. Errors as of `regions`.
        """
        if rank not in self.target.devices:
            raise LayoutError(f"rank {excerpt(rank)} is not on the target; legal are its devices")
        writer = RegionWriter(self.target.families, self.target.families)
        ids = (self._ids[1], self._ids[1])
        return write_regions(writer, self.relays, ids, (self.target.starts, self.target.starts), rank)

    def runs(self, rank: int) -> Iterator[tuple[int, int, int, int, int, int, int]]:
        """Yield the contiguous runs of a rank's regions, lazily: there can be 100 million.

        Each is (source rank, target rank, source parameter, target parameter, source offset, target offset, elements).
        """
        found = self.regions(rank)
        for k in range(len(found)):
            yield from region_runs(found, k)

    def itemsizes(self, move: int) -> tuple[int, int, int]:
        """Return the bytes of an element of a move: at the source, at the target, and under way."""
        m = self.moves[move]
        s = itemsize(self.source.families[m.source_family].dtype)
        t = itemsize(self.target.families[m.target_family].dtype)
        return s, t, min(s, t)

    @cached_property
    def traffic(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Who sends how much to whom: source ids, target ids and bytes, int64, a row a pair; no copies in place."""
        return self._pairs(self.moves, self._ids[0], [self.itemsizes(k)[2] for k in range(len(self.moves))])

    @cached_property
    def relay_traffic(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Who passes on how much to whom, inside nodes: ids and bytes as of `traffic`."""
        sizes = [itemsize(self.target.families[m.target_family].dtype) for m in self.relays]
        return self._pairs(self.relays, self._ids[1], sizes)

    def _pairs(
        self, moves: tuple[FamilyMove, ...], senders: np.ndarray, sizes: list[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sent = [senders[m.source] for m in moves]
        got = [self._ids[1][m.target] for m in moves]
        size = [m.elements * each for m, each in zip(moves, sizes, strict=True)]
        none = np.zeros(0, dtype=np.int64)
        s, t, b = (np.concatenate([none, *arrays]) for arrays in (sent, got, size))
        apart = s != t
        pairs, inverse = np.unique(np.stack([s, t], axis=1)[apart], axis=0, return_inverse=True)
        total = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(total, inverse.reshape(-1), b[apart])
        return pairs[:, 0], pairs[:, 1], total

    def _per_rank(self, side: int) -> tuple[int, ...]:
        total = dict.fromkeys(self.ranks, 0)
        for rank, size in zip(self.traffic[side].tolist(), self.traffic[2].tolist(), strict=True):
            total[rank] += size
        return tuple(total.values())

    @cached_property
    def sent_bytes(self) -> tuple[int, ...]:
        """What every rank sends, in order of `ranks`."""
        return self._per_rank(0)

    @cached_property
    def received_bytes(self) -> tuple[int, ...]:
        """What every rank receives, in order of `ranks`."""
        return self._per_rank(1)

    @property
    def seconds(self) -> float:
        """The predicted seconds of all messages at once; without a topology those of the nominal switch.

        What is passed on goes piece by piece behind what comes in, over ways of its own, and counts at the same time.
        """
        s, t, size = (np.concatenate(both) for both in zip(self.traffic, self.relay_traffic, strict=True))
        fabric = fabric_of(self.topology, (self.source.mesh, self.target.mesh))
        return seconds_on(Messages(s, t, size.astype(np.float64)), fabric) if len(s) else 0.0

    @cached_property
    def bound_seconds(self) -> float:
        """The least seconds in which all elements can arrive, sent by owners; see `limits`."""
        fabric = fabric_of(self.topology, (self.source.mesh, self.target.mesh))
        families = self.source.families
        moves = enumerate(zip(self.moves, self.relays or (None,) * len(self.moves), strict=True))
        return least_seconds(
            [demand_of(m, r, families[m.source_family], self._ids, self.itemsizes(k)[2]) for k, (m, r) in moves], fabric
        )

    @cached_property
    def replicas(self) -> WeightReplicas:
        """What the source holds more than once."""
        return WeightReplicas(self.source)

    def apply(
        self, arrays: Mapping[int, Mapping[str, Any]], compare_replicas: bool = True
    ) -> dict[int, dict[str, np.ndarray]]:
        """Run the plan on numpy arrays: the reference of what every other way to run it must give, bit for bit.

        Args:
            arrays: for every rank of the source, its parameters by name.
            compare_replicas: whether copies of one element must be equal; else one of them is taken.

        Returns:
            For every rank of the target, its parameters by name; padding is zero.

        Raises:
            LayoutError: parameters of a source rank that are missing, additional or misshapen; copies that differ.
        """
        return apply_refit(self, arrays, self.replicas.check if compare_replicas else lambda _: None)


def region_runs(found: RefitRegions, k: int) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """Yield the contiguous runs of a region, as `RefitPlan.runs` has them."""
    sizes, s, t = (a[k].tolist() for a in (found.sizes, found.source_strides, found.target_strides))
    length = 1
    while sizes and (sizes[-1] == 1 or (s[-1] == length and t[-1] == length)):
        length *= sizes.pop()
    head = (int(found.source[k]), int(found.target[k]), int(found.source_parameter[k]), int(found.target_parameter[k]))
    start = np.array([found.source_offset[k], found.target_offset[k]])
    steps = np.array([s[: len(sizes)], t[: len(sizes)]], dtype=np.int64)
    along = np.arange(sizes.pop())[:, None] * steps[:, -1] if sizes else np.zeros((1, 2), dtype=np.int64)
    for at in np.ndindex(*sizes):
        for source, target in (start + steps[:, : len(sizes)] @ np.array(at, dtype=np.int64) + along).tolist():
            yield (*head, source, target, length)


def refit(
    source: Weights,
    target: Weights,
    topology: Topology | Placement | str | None = None,
    memory_limit: float | str | None = None,
    only: str | Iterable[str] | None = None,
    relay: bool | None = False,
    drop: str | Iterable[str] = (),
    differ: str | Iterable[str] = (),
) -> RefitPlan:
    """Plan how the weights of one side become those of the other, with a proof that every element arrives, and of all.

    Args:
        source: what there is, on its devices.
        target: what is wanted, on its devices, which may be the same.
        topology: the cluster, by device ids, or a placement; None for the nominal switch.
        memory_limit: the bytes that each rank may allocate beyond its parameters, or text of them ("1 GB").
        only: logical tensors or stored parameters, as patterns with `*`: a part of the model; None for all.
        relay: whether receivers of one content on one node (of the innermost level but one of the topology) are fed
            once and pass it on (`passed_on`); None where that is cheaper. Who runs the plan must then run both.
        drop: logical tensors or stored parameters of the source, as patterns with `*`, that the target need not take.
        differ: fields of the configs (`rope_theta`) in which the sides may differ; none that sets shapes.

    Raises:
        LayoutError: sides of other shapes or other configs, an element that nobody owns or that nobody takes, or a
            pattern that nothing matches.

    >>> config = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...           "num_hidden_layers": 2, "vocab_size": 10}
    >>> a = Weights.load("megatron-llama", config, tensor=2)
    >>> b = Weights.load("vllm-llama", config, tensor=2, devices=[2, 3])
    >>> plan = refit(a, b)
    >>> len(plan.regions(3)), plan.received_bytes
    (19, (0, 0, 1360, 1040))
    >>> first = next(iter(plan.regions(3)))
    >>> a.names(first.source)[first.source_parameter], b.names(3)[first.target_parameter], first.sizes
    ('0.decoder.final_layernorm.weight', 'model.norm.weight', (1, 1, 1, 8))
    """
    for side, value in (("source", source), ("target", target)):
        if not isinstance(value, Weights):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"the {side} of a refit is {excerpt(value)}; legal are Weights")
    for side in (source, target):
        check_blocks(side)
    check_scaled(source, target)
    check_owners(source, target)
    check_agreement(source, target, differ)
    where, limit = where_of("topology", topology), limit_of("memory limit", memory_limit)
    if relay and where is None:
        raise LayoutError("relay=True needs a topology, which says what a node is; legal is topology=, or relay=False")
    if relay is None:
        given = source, target, topology, memory_limit, only
        plans = [refit(*given, r, drop, differ) for r in ((False, True) if where else (False,))]
        return min(plans, key=lambda plan: plan.seconds)
    node = _nodes(where, source, target) if relay and where is not None else None
    patterns = None if only is None else (only,) if isinstance(only, str) else tuple(only)
    ids = np.array(source.devices, dtype=np.int64), np.array(target.devices, dtype=np.int64)
    moves: list[FamilyMove] = []
    relays: list[FamilyMove] = []
    matched: set[str] = set()
    for number, family in enumerate(target.families):
        for tensor in family.tensors:
            hits = [p for p in patterns or () if fnmatchcase(tensor, p) or fnmatchcase(family.entry.name, p)]
            matched |= set(hits)
            if patterns is not None and not hits:
                continue
            contents = family_contents(family, tensor)
            owner, cells = covering(source, target, family, tensor, contents)
            held = source.families[owner]
            wire = min(itemsize(held.dtype), itemsize(family.dtype))
            sides = (owner, held, ids[0]), (number, family, ids[1])
            direct, inside = move_of(tensor, sides, contents, cells, wire, len(moves), node)
            moves.append(direct)
            relays.append(inside)
    for pattern in patterns or ():
        if pattern not in matched:
            legal = ", ".join(dict.fromkeys(t for f in target.families for t in f.tensors))
            raise LayoutError(
                f"only = {excerpt(pattern)} matches nothing; legal are parameters of the target, and {legal}"
            )
    dropped = check_drops(source, target, patterns, drop)
    passed = () if node is None else tuple(relays)
    return RefitPlan(source, target, patterns, where, limit, tuple(moves), passed, dropped)


def _nodes(where: Where, source: Weights, target: Weights) -> np.ndarray:
    """The node of every place of the target: its unit at the innermost level but one."""
    fabric = fabric_of(where, (source.mesh, target.mesh))
    inner = fabric.wires[-1].level.size
    return fabric.topology_ids(np.array(target.devices, dtype=np.int64)) // inner


# What two sides' configs must agree on beside the shapes: models of one shape that compute something else.
#
# A family declares it (`[agree]`): names of fields, each with where a config says it.


def said_of(side: Weights, field: str, text: str) -> Any:
    """Return what a side's config says of a field, None where it does not."""
    try:
        value = evaluate_arithmetic(text, side.sizing.look)
    except LayoutError:
        return None
    whole = value.denominator == 1 if isinstance(value, Fraction) else isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def check_agreement(source: Weights, target: Weights, differ: str | Iterable[str] = ()) -> tuple[str, ...]:
    """Compare both sides' configs on the fields that their families declare; return those that may differ, and do.

    Raises `LayoutError` naming every field that differs, with both values; for a field in `differ` that does not, and
    for one that sets shapes.
    """
    given = (differ,) if isinstance(differ, str) else tuple(differ)
    first, second = dict(source.table.agree), dict(target.table.agree)
    apart: dict[str, tuple[Any, Any]] = {}
    shapes: set[str] = set()
    for field in dict.fromkeys([*first, *second]):
        texts = first.get(field) or second[field], second.get(field) or first[field]
        mine, theirs = (said_of(side, field, t) for side, t in zip((source, target), texts, strict=True))
        silent = (mine is None and field not in first) or (theirs is None and field not in second)
        if mine != theirs and not silent:
            apart[field] = mine, theirs
            used = {n for side in (source, target) for _, text in side.table.atoms for n in names_in(text)}
            shapes |= {field} if used & {n for text in texts for n in names_in(text)} else set()
    for name in given:
        if name not in apart or name in shapes:
            why = "sets shapes" if name in shapes else "is no field in which the configs differ"
            some = ", ".join(f for f in apart if f not in shapes) or "those that set none, where they differ"
            raise LayoutError(f"differ = {excerpt(name)} {why}; legal are {some}")
    wrong = {field: values for field, values in apart.items() if field not in given}
    if wrong:
        every = [f"{f} is {_value(a)} at the source and {_value(b)} at the target" for f, (a, b) in wrong.items()]
        may = [f for f in wrong if f not in shapes]
        more = f", or differ = {', '.join(map(repr, may))} ({' '.join(f'--differ {f}' for f in may)})" if may else ""
        raise LayoutError(
            f"the configs of {_name(source)} and {_name(target)} differ: {'; '.join(every)}; legal is one config{more}"
        )
    return given


def _value(value: Any) -> str:
    return "not said" if value is None else excerpt(value)


def _name(side: Weights) -> str:
    return side.table.name or "a table"
