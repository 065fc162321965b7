"""`fuse_graph`: the pass on graphs of torch.fx, as AOT makes them, with functional collectives.

A product, perhaps with a bias and an activation, whose blocks of rows or of columns go to their ranks; a thin product
that is summed; a product whose sum is cut by rows, or whose rows are gathered; bags of tables, side by side, that go to
the ranks of the batch. The rest of a graph stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardplan.core.fusing import DTYPES
from shardplan.errors import TopologyError, optional
from shardplan.fused.calls.groups import bound_groups
from shardplan.fused.deciding.fuse import constants_of
from shardplan.fused.deciding.graph_nodes import (
    product_between,
    shape_of_node,
    tables,
    trace_consumers,
    trace_producers,
    value,
    written_between,
)
from shardplan.fused.deciding.graph_patterns import (
    GraphMatch,
    PatternUnfit,
    bag_match,
    gather_match,
    gemm_match,
    gemv_match,
    grouped_match,
    is_thin,
    scatter_match,
)
from shardplan.fused.deciding.rows import Fusion, FusionRow, seconds_of
from shardplan.fused.kernels.vectors import dtype_name
from shardplan.fused.tiles.schedule import SLOTS
from shardplan.hardware.prices.fused import UNFUSED, FusedConstants, FusedWork, decide

if TYPE_CHECKING:
    from torch.fx import GraphModule


@dataclass(frozen=True, slots=True)
class GraphGroup:
    """A process group as the pass needs to know it: its ranks, whether they map each other's memory, and free bytes."""

    ranks: int
    peers: bool = True
    room: float = math.inf


def fuse_graph(
    graph_module: GraphModule,
    calibration: FusedConstants | str | Path,
    groups: Mapping[str, GraphGroup] | None = None,
) -> Fusion[GraphModule]:
    """Return a graph in which computations and the collectives behind them are one operator where that pays.

    Args:
        graph_module: A graph after AOT: operators of `aten`, and of `_c10d_functional`, its nodes with their values'
            shapes in `meta["val"]`. It is not changed.
        calibration: The constants of the transport and of the kernels, or the path of their file.
        groups: By name the process groups, by default those that have a symmetric heap.

    Returns:
        A new graph, which calls `torch.ops.shardplan`, and a row for every all-to-all of a product or of bags, every
        sum of a thin product, every reduce-scatter of a product and every all-gather before one.

    Raises:
        TopologyError: Constants without kernels that are needed.
    """
    torch = optional("torch", "torch")
    import_module("shardplan.fused.library")  # which registers the operators
    constants = constants_of(calibration)
    if constants is None:
        raise TopologyError("fuse_graph: calibration is None; legal are FusedConstants, or the path of their file")
    known = groups
    if known is None:
        known = {name: GraphGroup(heap.ranks, True, heap.nbytes - heap.used) for name, heap in bound_groups()}
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    made = torch.fx.GraphModule(graph_module, graph)
    for old, new in zip(graph_module.graph.nodes, graph.nodes, strict=True):
        new.meta = dict(old.meta)
    with torch.utils._python_dispatch._disable_current_modes():  # numbers are real ones, whoever traces
        rows = _rewrite(graph, constants, known)
    graph.lint()
    made.recompile()
    return Fusion(made, tuple(rows), constants.source or constants.backend)


def _rewrite(graph: Any, constants: FusedConstants, groups: Mapping[str, GraphGroup]) -> list[FusionRow]:
    """Fuse the pairs that pay, of two with one product that which saves more; the rows of all."""
    tried = {node: _candidate(graph, node, constants, groups) for node in graph.nodes}
    found = {node: one for node, one in tried.items() if one is not None}
    rows = {node: one.row for node, one in found.items()}
    taken: dict[Any, Any] = {}
    for node in sorted(found, key=lambda node: -rows[node].saved_seconds):
        if not rows[node].is_fused:
            continue
        other = next((taken[end] for end in found[node].ends if end in taken), None)
        if other is None:
            taken |= dict.fromkeys(found[node].ends, node)
        else:
            text = "its product is that of this pair, which saves more"
            rows[node] = replace(rows[node], reason="taken", choice=str(UNFUSED), blocked=other.name, text=text)
    for node in [node for node, row in rows.items() if row.is_fused]:
        now = _candidate(graph, node, constants, groups)  # what it reads may have been rewritten
        assert now is not None
        rows[node] = now.row
        if now.write is not None:
            now.write()
    return list(rows.values())


class _GraphPair(NamedTuple):
    """A collective and the computation beside it: products or bags, what stands between, what of that is strange."""

    name: str
    ends: list[Any]
    between: list[Any]
    strange: list[Any]
    match: Callable[..., GraphMatch]


class _GraphCandidate(NamedTuple):
    """A pair: its row, its products or bags, and what writes it where it is fused."""

    row: FusionRow
    ends: list[Any]
    write: Callable[[], None] | None = None


def _pair_of(move: Any, waits: Sequence[Any]) -> _GraphPair | None:
    """The pair of a collective, None where there is none."""
    found = tables()
    if move.op != "call_function" or not waits:
        return None
    if move.target in found.all_gather:
        ends, inside, strange = trace_consumers(waits[0])
        return _GraphPair("all_gather_gemm", ends, inside, strange, gather_match) if ends else None
    if move.target not in found.all_to_all | found.all_reduce | found.reduce_scatter:
        return None
    ends, inside, strange = trace_producers(move.args[0])
    if not ends:
        return None
    of = {end.target for end in ends}
    if of & found.grouped:
        return _GraphPair("grouped_gemm_all_to_all", ends, inside, strange, grouped_match)
    if move.target in found.all_to_all:
        if of & found.bags:
            return _GraphPair("embedding_bag_all_to_all", ends, inside, strange, bag_match)
        return _GraphPair("gemm_all_to_all", ends, inside, strange, gemm_match)
    if of & found.bags:
        return None
    if move.target in found.reduce_scatter:
        return _GraphPair("gemm_reduce_scatter", ends, inside, strange, scatter_match)
    return (
        _GraphPair("gemv_all_reduce", ends, inside, strange, gemv_match)
        if len(ends) == 1 and is_thin(ends[0])
        else None
    )


def _candidate(
    graph: Any, move: Any, constants: FusedConstants, groups: Mapping[str, GraphGroup]
) -> _GraphCandidate | None:
    """Return a collective and the computation beside it, to be fused where it pays; None where it is no candidate."""
    found = tables()
    waits = [u for u in move.users if u.target is found.wait]
    pair = _pair_of(move, waits)
    if pair is None:
        return None
    name, ends, inside, strange, match_pair = pair
    gathers, thin = move.target in found.all_gather, move.target in found.all_reduce
    operands = [n for end in ends for n in end.all_input_nodes]
    row = FusionRow(
        move.name,
        name,
        (*(_text(n) for n in operands), _text(ends[0] if gathers else move)),
        _bytes(move.args[0]),
        {},
        str(UNFUSED),
        "",
        source=constants.source or constants.backend,
    )

    def refused(reason: str, node: Any, text: str) -> _GraphCandidate:
        return _GraphCandidate(replace(row, reason=reason, blocked=node.name, text=text), ends)

    group_name = move.args[-1]
    group = groups.get(group_name)
    inner = {*ends[:1], waits[0], *inside} if gathers else {*ends, *inside, move}
    for node in (waits[0], *inside) if gathers else (*ends, *inside):
        if others := [u for u in node.users if u not in inner and not _dead(u)]:
            legal = "one product" if gathers else "the move alone"
            return refused("several_users", node, f"it is read by {others[0].name}, too; legal is by {legal}")
    if len(waits) != 1 or len(move.users) != 1:
        return refused("several_users", move, f"{len(move.users)} nodes read it; legal is one wait_tensor")
    sums = thin or move.target in found.reduce_scatter
    if sums and move.args[1] != "sum":
        return refused("not_sum", move, f"reduction {move.args[1]}; legal is sum")
    if strange:
        return refused("effect_between", strange[0], "it stands between the computation and the move")
    read = (move, ends[0], [move.args[0]]) if gathers else (ends[0], move, operands)
    if (writer := written_between(graph, *read)) is not None:
        return refused("effect_between", writer, "it writes what is read by the other step of the pair")
    if (gathers or (sums and not thin)) and (other := product_between(graph, move, waits[0])) is not None:
        return refused("overlapped", other, "it runs while the move does, which is hidden as it is")
    if group is None:
        legal = ", ".join(groups) or "none yet: bind_group"
        return refused("unknown_group", move, f"group {group_name!r} has no symmetric heap; known are {legal}")
    if not group.peers:
        return refused("no_peer_access", move, f"ranks of {group_name!r} do not map each other's memory")
    kind = dtype_name(value(ends[0].args[0] if ends[0].target in found.bags else ends[0]))
    if kind not in DTYPES:
        return refused("dtype", ends[0], f"{kind}; legal are {', '.join(DTYPES)}")
    try:
        match = match_pair(ends, inside, move, waits[0], group.ranks)
    except PatternUnfit as error:
        return refused(error.reason, error.node, str(error))
    landing = max(_bytes(waits[0]) * (group.ranks if thin else 1), int(match.addend_bytes))
    if (need := SLOTS * landing) > group.room:
        return refused("memory", move, f"{need} B for {SLOTS} slots; the heap of {group_name!r} has {group.room} B")
    decision = decide(_work(match, group.ranks, constants), constants.of_kind(match.kind))
    row = replace(row, seconds=seconds_of(decision))
    if decision.best_variant == UNFUSED:
        return _GraphCandidate(replace(row, reason="not_faster"), ends)
    row = replace(row, reason="fused", choice=str(decision.best_variant))
    return _GraphCandidate(row, ends, lambda: match.write(graph, decision.best_variant))


def _work(match: GraphMatch, ranks: int, constants: FusedConstants) -> FusedWork:
    kernel = constants.kernel(match.kind)
    if kernel is None:
        raise TopologyError(
            f"fuse_graph: constants of {constants.backend} without kernels {match.kind}; legal are some"
        )
    seconds, own = kernel.seconds(match.flops, match.read, match.written)
    sums = match.sum_bytes > 0, match.sum_bytes
    return FusedWork(seconds, match.nbytes, ranks, *sums, own, match.addend_bytes)


def _dead(node: Any) -> bool:
    return node.op == "call_function" and not node.users


def _text(node: Any) -> str:
    """Dtype and shape of a node's value."""
    found = value(node)
    if found is None or not hasattr(found, "shape"):
        return "?"
    return f"{dtype_name(found)}[{', '.join(map(str, found.shape))}]".replace("torch.", "")


def _bytes(node: Any) -> int:
    shape = shape_of_node(node)
    return 0 if shape is None else math.prod(shape) * value(node).dtype.itemsize
