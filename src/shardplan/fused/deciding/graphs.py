"""`fuse_graph`: the pass on graphs of torch.fx, as AOT makes them, with functional collectives.

A product, perhaps with a bias and an activation, whose blocks of rows or of columns go to their ranks; a thin product
that is summed; bags of tables, side by side, that go to the ranks of the batch. The rest of a graph stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardplan.errors import TopologyError, optional
from shardplan.fused.calls.groups import bound_groups
from shardplan.fused.deciding.fuse import SLOTS, constants_of
from shardplan.fused.deciding.graph_nodes import shape_of_node, tables, trace_producers, value, written_between
from shardplan.fused.deciding.graph_patterns import GraphMatch, PatternUnfit, bag_match, gemm_match, gemv_match, is_thin
from shardplan.fused.deciding.rows import Fusion, FusionRow, seconds_of
from shardplan.fused.kernels.vectors import dtype_name
from shardplan.hardware.prices.fused import UNFUSED, FusedConstants, FusedWork, decide

if TYPE_CHECKING:
    from torch.fx import GraphModule

DTYPES = ("f32", "bf16", "f16")


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
        A new graph, which calls `torch.ops.shardplan`, and a row for every all-to-all of a product or of bags, and for
        every sum of a thin product.

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
    rows: list[FusionRow] = []
    with torch.utils._python_dispatch._disable_current_modes():  # numbers are real ones, whoever traces
        for node in list(graph.nodes):
            row = _candidate(graph, node, constants, known)
            rows += [] if row is None else [row]
    graph.lint()
    made.recompile()
    return Fusion(made, tuple(rows), constants.source or constants.backend)


def _candidate(graph: Any, move: Any, constants: FusedConstants, groups: Mapping[str, GraphGroup]) -> FusionRow | None:
    """Fuse what is behind a collective where it pays; its row, None where it is no candidate."""
    found = tables()
    reduces = move.op == "call_function" and move.target in found.all_reduce
    if not reduces and not (move.op == "call_function" and move.target in found.all_to_all):
        return None
    ends, between, strange = trace_producers(move.args[0])
    if not ends or (reduces and not (len(ends) == 1 and ends[0].target in found.products and is_thin(ends[0]))):
        return None
    bags = ends[0].target in found.bags
    name = "gemv_all_reduce" if reduces else "embedding_bag_all_to_all" if bags else "gemm_all_to_all"
    operands = [n for end in ends for n in end.all_input_nodes]
    row = FusionRow(
        move.name,
        name,
        (*(_text(n) for n in operands), _text(move)),
        _bytes(move.args[0]),
        {},
        str(UNFUSED),
        "",
        source=constants.source or constants.backend,
    )

    def refused(reason: str, node: Any, text: str) -> FusionRow:
        return replace(row, reason=reason, blocked=node.name, text=text)

    group_name = move.args[-1]
    group = groups.get(group_name)
    inner = {*ends, *between, move}
    for node in (*ends, *between, move):
        if node is not move and (others := [u for u in node.users if u not in inner and not _dead(u)]):
            return refused("several_users", node, f"it is read by {others[0].name}, too; legal is by the move alone")
    waits = [u for u in move.users if u.target is found.wait]
    if len(waits) != 1 or len(move.users) != 1:
        return refused("several_users", move, f"{len(move.users)} nodes read it; legal is one wait_tensor")
    if reduces and move.args[1] != "sum":
        return refused("not_sum", move, f"reduction {move.args[1]}; legal is sum")
    if strange:
        return refused("effect_between", strange[0], "it stands between the computation and the move")
    if (writer := written_between(graph, ends[0], move, operands)) is not None:
        return refused("effect_between", writer, "it writes what the computation reads, before the move")
    if group is None:
        legal = ", ".join(groups) or "none yet: bind_group"
        return refused("unknown_group", move, f"group {group_name!r} has no symmetric heap; known are {legal}")
    if not group.peers:
        return refused("no_peer_access", move, f"ranks of {group_name!r} do not map each other's memory")
    kind = dtype_name(value(ends[0])) if not bags else dtype_name(value(ends[0].args[0]))
    if kind not in DTYPES:
        return refused("dtype", ends[0], f"{kind}; legal are {', '.join(DTYPES)}")
    try:
        match = (gemv_match if reduces else bag_match if bags else gemm_match)(
            ends, between, move, waits[0], group.ranks
        )
    except PatternUnfit as error:
        return refused(error.reason, error.node, str(error))
    if (need := SLOTS * _bytes(waits[0]) * (group.ranks if reduces else 1)) > group.room:
        return refused("memory", move, f"{need} B for {SLOTS} slots; the heap of {group_name!r} has {group.room} B")
    decision = decide(_work(match, group.ranks, constants), constants.of_kind(match.kind))
    row = replace(row, seconds=seconds_of(decision))
    if decision.best_variant == UNFUSED:
        return replace(row, reason="not_faster")
    match.write(graph, decision.best_variant)
    return replace(row, reason="fused", choice=str(decision.best_variant))


def _work(match: GraphMatch, ranks: int, constants: FusedConstants) -> FusedWork:
    kernel = constants.kernel(match.kind)
    if kernel is None:
        raise TopologyError(
            f"fuse_graph: constants of {constants.backend} without kernels {match.kind}; legal are some"
        )
    seconds, own = kernel.seconds(match.flops, match.read, match.nbytes)
    return FusedWork(seconds, match.nbytes, ranks, match.sum_bytes > 0, match.sum_bytes, own)


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
