"""`diff`: whether two checkpoints, or a live model and one, hold one model, and the first element that differs.

The second is read as the first stores it, window by window, and compared bit for bit; no file is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.errors import Infeasible, LayoutError, ParseError, ShardplanError, excerpt, line
from shardplan.hardware.units import format_bytes, limit_of
from shardplan.interop.checkpoint.filling import fill_part
from shardplan.interop.checkpoint.gather import WindowGather
from shardplan.interop.checkpoint.jobs import BESIDE, BUFFERS, LARGEST_WINDOW, LEAST_WINDOW, REGION, Progress
from shardplan.interop.checkpoint.layouts import layout_weights
from shardplan.interop.checkpoint.live import live_rank, live_side
from shardplan.interop.checkpoint.replicas import compare_copies
from shardplan.interop.checkpoint.reshard import recorded_weights
from shardplan.interop.checkpoint.sources import OpenCheckpoint, open_checkpoint
from shardplan.interop.checkpoint.storage_detection import find_weights
from shardplan.interop.checkpoint.windows import PiecesOf, WindowPart, windows
from shardplan.movement.weights.drops import check_drops, left_out
from shardplan.movement.weights.logical import LogicalDim
from shardplan.movement.weights.refit import RefitPlan, refit
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights, make_weights, names_of


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """Where two checkpoints first differ: the parameter and index in each (of a name only, no index), and the values.

    `rank` and `other_rank` are device ids of either side. `place` is the logical tensor, and the index of every atom
    of it; None where a name is all that differs.
    """

    rank: int
    name: str
    index: tuple[int, ...] | None
    value: str
    other_rank: int
    other_name: str
    other_index: tuple[int, ...] | None
    other_value: str
    place: LogicalPlace | None = None

    def __str__(self) -> str:
        """Return one line."""
        head = f"{place_text(self.place)}: " if self.place is not None else ""
        return f"{head}{_describe_element(self.rank, self.name, self.index, self.value)}; " + _describe_element(
            self.other_rank, self.other_name, self.other_index, self.other_value
        )


@dataclass(frozen=True, slots=True)
class CheckpointsCompared:
    """What was compared: parameters, elements, and the first difference, None where there is none."""

    parameters: int
    elements: int
    difference: CheckpointDifference | None

    @property
    def equal(self) -> bool:
        """Whether both hold one model."""
        return self.difference is None


def _describe_element(rank: int, name: str, index: tuple[int, ...] | None, value: str) -> str:
    at = "" if index is None else f"[{', '.join(map(str, index))}]"
    return f"rank {rank} {name}{at} {'=' if index is not None else 'is'} {value}"


def diff(
    a: Any,
    b: Any,
    *,
    weights: Weights | None = None,
    other: Weights | None = None,
    rank: int | None = None,
    memory_limit: float | str = "1 GB",
    ignore: Iterable[str] = (),
    drop: str | Iterable[str] = (),
    differ: str | Iterable[str] = (),
    compare_replicas: bool = True,
    progress: Progress | None = None,
) -> CheckpointsCompared:
    """Compare two checkpoints, or a live model and one, logically, and find the first element that differs.

    The order is that of the first's names; of a live side's, where there is one. Of a live side only the parameters of
    its rank are compared: every rank compares its own.

    Args:
        a: a checkpoint, in any form that `reshard` reads; or a live side: a `torch.nn.Module`, a list of them, or
            tensors by name, those of one rank. DTensors are read as the rank's own shard.
        b: another.
        weights: how `a` stores the model; None for what it says itself, if reshard wrote it, else as the other where
            that is of one device, else whole tensors. A live side does not say it.
        other: how `b` does, likewise.
        rank: the device that a live side is of; it may be left out where there is one.
        memory_limit: the bytes that may be in memory beyond the interpreter and a live side, or text of them.
        ignore: names of tensors that are left out where no table has them; patterns with `*`, too.
        drop: tensors that only one of the two has, and that are left out, logical or as stored; patterns with `*`, too.
        differ: fields of the configs (`rope_theta`) in which the two may differ.
        compare_replicas: whether copies of one element must be equal within each; else some are not looked at.
        progress: called with bytes done, bytes to do, and what is being done.

    Raises:
        LayoutError: a checkpoint that is not what its weights say, or sides of other shapes.
        ParseError: no checkpoint, or one that breaks its format.
        Infeasible: a memory limit that is too small; it names the least.
    """
    limit = limit_of("memory limit", memory_limit)
    assert limit is not None
    ignored, patterns = tuple(ignore), (drop,) if isinstance(drop, str) else tuple(drop)
    live = [not isinstance(x, str | Path) for x in (a, b)]
    if live[1] and not live[0]:
        found = diff(
            b, a, weights=other, other=weights, rank=rank, memory_limit=limit, ignore=ignored, drop=drop, differ=differ,
            compare_replicas=compare_replicas, progress=progress,
        )  # fmt: skip
        return CheckpointsCompared(found.parameters, found.elements, _swap_sides(found.difference))
    if all(live):
        raise LayoutError("diff of two live models; legal is a checkpoint on one side, or both")
    if rank is not None and not live[0]:
        raise LayoutError(f"rank = {excerpt(rank)} with two checkpoints; legal with a live model")
    second = _resolve_weights(Path(b), other)
    if live[0]:
        first, own = live_rank(weights, rank)
        with open_checkpoint(b, _devices(second), ignored) as theirs:
            second = theirs.side(second or _as(first, theirs, ignored) or _unsharded_weights(theirs, b))
            theirs.check(second, ignored)
            plan, mine = _plan(second, first, patterns, differ), live_side(a, first, own)
            copies = compare_replicas and own == first.devices[0]  # one of the live ranks looks at the other side's
            return _compare_checkpoints(plan, mine, theirs, (own,), limit, copies, progress)
    first = _resolve_weights(Path(a), weights)
    with (
        open_checkpoint(a, _devices(first), ignored) as mine,
        open_checkpoint(b, _devices(second), ignored) as theirs,
    ):
        if first is None and second is None and (apart := _names_differ(mine, theirs)) is not None:
            return CheckpointsCompared(0, 0, apart)
        # one that says nothing is stored as the other, where that is of whole tensors
        first, second = (
            first or _as(second, mine, ignored) or _unsharded_weights(mine, a),
            second or _as(first, theirs, ignored) or _unsharded_weights(theirs, b),
        )
        first, second = mine.side(first), theirs.side(second)
        mine.check(first, ignored)
        theirs.check(second, ignored)
        plan = _plan(second, first, patterns, differ)
        return _compare_checkpoints(plan, mine, theirs, first.devices, limit, compare_replicas, progress)


def _plan(theirs: Weights, mine: Weights, patterns: tuple[str, ...], differ: str | Iterable[str]) -> RefitPlan:
    """Return the plan that reads the second as the first is stored, without what only one has and may be dropped."""
    more, less = left_out(mine, theirs), left_out(theirs, mine)
    known = [p for p in patterns if any(f.matches(p) for f in less)]
    chosen = [f.tensor for f in more if any(f.matches(p) for p in patterns)]
    if not chosen:
        return refit(theirs, mine, drop=patterns, differ=differ)
    for p in patterns:
        if p not in known and not any(f.matches(p) for f in more):
            check_drops(theirs, mine, None, (p,))  # which says what it could be
    check_drops(theirs, mine, None, known)
    return refit(theirs, mine, only=[t for t in mine.tensors if t not in chosen], differ=differ)


def _swap_sides(found: CheckpointDifference | None) -> CheckpointDifference | None:
    """Return a difference as the other side sees it."""
    if found is None:
        return None
    mine = found.rank, found.name, found.index, found.value
    theirs = found.other_rank, found.other_name, found.other_index, found.other_value
    return CheckpointDifference(*theirs, *mine, found.place)


def _devices(weights: Weights | None) -> int:
    return 1 if weights is None else len(weights.devices)


def _resolve_weights(path: Path, weights: Weights | None) -> Weights | None:
    return recorded_weights(path) if weights is None else weights


def _as(weights: Weights | None, held: OpenCheckpoint, ignored: tuple[str, ...]) -> Weights | None:
    """How a checkpoint that says nothing is stored, seen from the other: like it, or as its own names show."""
    if weights is None or len(held.places) > 1:
        return None
    if len(weights.devices) == 1 and held.first_tensors.keys() >= {*weights.names(weights.devices[0])}:
        return weights
    try:
        return find_weights(held, dict(weights.config), ignored)
    except (LayoutError, ParseError):
        return weights if len(weights.devices) == 1 else None


def _unsharded_weights(held: OpenCheckpoint, path: str | Path) -> Weights:
    if len(held.places) > 1:
        raise LayoutError(f"{line(path)} is sharded ({held.form}) and says not how; legal is to say its table")
    return layout_weights(None, {name: (tuple(t.shape), t.dtype_name) for name, t in held.first_tensors.items()})


def _names_differ(mine: OpenCheckpoint, theirs: OpenCheckpoint) -> CheckpointDifference | None:
    """Return the first name that only one has, or whose shape or dtype differs."""
    if len(mine.places) > 1 or len(theirs.places) > 1:
        return None
    a, b = mine.first_tensors, theirs.first_tensors
    for name in sorted({*a, *b}):
        said = [f"{t.dtype_name}{list(t.shape)}" if (t := x.get(name)) is not None else "absent" for x in (a, b)]
        if said[0] != said[1]:
            return CheckpointDifference(0, name, None, said[0], 0, name, None, said[1])
    return None


def _compare_checkpoints(
    plan: RefitPlan,
    mine: OpenCheckpoint,
    theirs: OpenCheckpoint,
    ranks: tuple[int, ...],
    limit: int,
    copies: bool,
    progress: Progress | None,
) -> CheckpointsCompared:
    regions = max(len(plan.regions(r)) for r in ranks)
    beside = BESIDE + regions * REGION
    least = beside + BUFFERS * LEAST_WINDOW
    if limit < least:
        raise Infeasible(
            f"diff within {format_bytes(limit)}: no way; the least that works is {least} bytes", least, least
        )
    size = min((limit - beside) // BUFFERS, LARGEST_WINDOW) // 8 * 8
    gather = WindowGather(size)
    if copies:  # those of the first are each compared with the second
        compare_copies(plan, theirs, plan.source.devices, gather, lambda: None)
    ours, other = np.empty(size, dtype=np.uint8), np.empty(size, dtype=np.uint8)
    total = sum(plan.target.nbytes(r) for r in ranks)
    done = parameters = elements = 0
    for rank in ranks:
        legal = plan.target.parameters(rank)
        every = plan.regions(rank)
        pieces = PiecesOf(every.select_regions(every.target == rank))
        sizes = [(k, int(np.prod(s, dtype=np.int64)), numpy_dtype(d).itemsize) for k, (_, s, d) in enumerate(legal)]
        for parts, used in windows(sizes, size):
            for part in parts:
                name, shape, dtype = legal[part.parameter]
                fill_part(plan, theirs, gather, pieces, part, other, numpy_dtype(dtype))
                width = numpy_dtype(dtype).itemsize
                span = slice(part.at, part.at + (part.hi - part.lo) * width)
                mine.tensor(plan.target.place(rank), name).read_into(memoryview(ours[span]), part.lo)  # pyright: ignore
                if (at := _first_difference(ours[span], other[span], width, pieces, part)) is not None:
                    values = [str(x[span].view(numpy_dtype(dtype))[at - part.lo]) for x in (ours, other)]
                    where = _locate_element(plan, pieces, part, at)
                    index = tuple(int(i) for i in np.unravel_index(at, shape)) if shape else ()
                    place = logical_place(plan.target, rank, part.parameter, at)
                    found = CheckpointDifference(rank, name, index, values[0], *where, values[1], place)
                    return CheckpointsCompared(parameters, elements, found)
                elements += part.hi - part.lo
            done += used
            if progress is not None:
                progress(done, total, legal[parts[-1].parameter][0])
        parameters += len(legal)
    return CheckpointsCompared(parameters, elements, None)


def _first_difference(
    ours: np.ndarray, other: np.ndarray, width: int, pieces: PiecesOf, part: WindowPart
) -> int | None:
    """Return the first element, of the parameter, whose bytes differ; what is padding is not compared."""
    if np.array_equal(ours, other):
        return None
    apart = (ours.reshape(-1, width) != other.reshape(-1, width)).any(axis=1)
    for k in np.flatnonzero(apart).tolist():
        if any(True for _ in pieces.pieces_within(WindowPart(part.parameter, part.lo + k, part.lo + k + 1, 0))):
            return part.lo + k
    return None


def _locate_element(plan: RefitPlan, pieces: PiecesOf, part: WindowPart, at: int) -> tuple[int, str, tuple[int, ...]]:
    """Return rank, name and index at the other side of an element."""
    k, _, _, _, s_at, _ = next(pieces.pieces_within(WindowPart(part.parameter, at, at + 1, 0)))
    rank = int(pieces.regions.source[k])
    name = names_of(plan.source, rank)[int(pieces.regions.source_parameter[k])]
    shape: Any = plan.source.shape(name, rank)
    return rank, name, tuple(int(i) for i in np.unravel_index(s_at, shape)) if shape else ()


_PLAIN = re.compile(r"d(\d+)_\d+\Z")  # an atom of a tensor that has no table; see `layouts`
LogicalPlace = tuple[str, tuple[tuple[str, int], ...]]
"""A tensor, and the index of every atom of it, in order of its dims; see `logical_place`."""


def logical_place(weights: Weights, rank: int, number: int, at: int) -> LogicalPlace | None:
    """Return where an element stands: of the parameter of this number in `names(rank)`, `at` in C order.

    Of a tensor without a table the name is its own and the atoms are "". None for padding, and where the logical
    tensors cannot be stored one by one.
    """
    try:
        whole = _one_by_one(weights)
        plan = refit(whole, weights)
        found = plan.regions(rank)
    except ShardplanError:
        return None
    pieces = PiecesOf(found.select_regions(found.target == rank))
    hit = next(pieces.pieces_within(WindowPart(number, at, at + 1, 0)), None)
    if hit is None:
        return None
    row, _, _, _, flat, _ = hit
    name, _, numbers = whole.names(whole.devices[0])[int(pieces.regions.source_parameter[row])].partition(".")
    tensor = weights.tensors[name]
    inside = iter(
        np.unravel_index(flat, [n for n, d in zip(tensor.extents, tensor.dims, strict=True) if not _is_in_name(d)])
    )
    named = iter(map(int, filter(None, numbers.split("."))))
    index = [next(named) if _is_in_name(d) else int(next(inside)) for d in tensor.dims]
    out: list[tuple[str, int]] = []
    for dim, i in zip(tensor.dims, index, strict=True):
        sizes = [weights.sizing[a] for a in dim.atoms]
        out += zip(dim.atoms, map(int, np.unravel_index(i, sizes) if sizes else ()), strict=True)
    if out and all(_PLAIN.match(a) for a, _ in out):
        return weights.families[plan.moves[int(pieces.regions.move[row])].target_family].entry.name, tuple(
            ("", i) for _, i in out
        )
    return name, tuple(out)


def place_text(place: LogicalPlace) -> str:
    """Return a place as text.

    >>> place_text(("k", (("l", 1), ("d", 7)))), place_text(("lm_head.weight", (("", 3),)))
    ('k[l=1, d=7]', 'lm_head.weight[3]')
    """
    name, index = place
    return f"{name}[{', '.join(f'{atom}={i}' if atom else str(i) for atom, i in index)}]"


def _is_in_name(dim: LogicalDim) -> bool:
    """Whether a dim stands in the name where tensors are stored one by one: one with a range."""
    return bool(dim.first or dim.stop or dim.step)


def _one_by_one(weights: Weights) -> Weights:
    """Return weights of one device that store every logical tensor whole, under its own name."""
    parameters: list[dict[str, Any]] = []
    holes: dict[str, str] = {}
    for family in weights.families:
        for name in family.tensors:
            if all(p["name"].partition(".")[0] != name for p in parameters):
                found = weights.tensors[name].dims
                dims = ["1" if not d.atoms else f"({' '.join(d.atoms)})" for d in found if not _is_in_name(d)]
                path = "".join(f".{{{d.atoms[0]}}}" for d in found if _is_in_name(d))
                holes |= {d.atoms[0]: d.atoms[0] for d in found if _is_in_name(d)}
                parameters.append({"name": name + path, "is": f"{name} = {', '.join(dims)}", "dtype": family.dtype})
    table = weights.table
    of: dict[str, Any] = {"tensors": dict(table.tensors)}
    of["scales"] = {name: {"of": other, "block": list(block)} for name, other, block in table.scales}
    data: dict[str, Any] = {
        "name": "logical tensors",
        "mesh": ["device"],
        "degrees": {"device": 1, **{k: v for k, v in weights.degrees.items() if k != "device"}},
        "atoms": dict(table.atoms),
        "of": of,
        "holes": holes,
        "parameters": parameters,
    }
    return make_weights(WeightTable.of(data, "the logical tensors"), dict(weights.config), {}, None, weights.dtype)
