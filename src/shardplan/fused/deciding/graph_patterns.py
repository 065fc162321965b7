"""The patterns in graphs of torch.fx: what goes to whom, by the numbers of elements; and the rewriting."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.core.ops.fused import ADDEND
from shardplan.core.ops.fused_forms import THIN
from shardplan.errors import TypingError, optional
from shardplan.fused.deciding.graph_nodes import MOST_ELEMENTS, propagate_indices, shape_of_node, tables, value
from shardplan.hardware.prices.fused import FusedVariant


class PatternUnfit(TypingError):
    """A pattern that is none after all: the reason, and the node that it is about."""

    def __init__(self, reason: str, node: Any, text: str) -> None:
        super().__init__(text)
        self.reason, self.node = reason, node


@dataclass(frozen=True, slots=True)
class GraphMatch:
    """A match: the `kind` of its kernels, operations, bytes read and written, and as in `FusedWork`; what writes it."""

    kind: str
    flops: float
    read: float
    written: float
    nbytes: float
    sum_bytes: float
    addend_bytes: float
    write: Callable[[Any, FusedVariant], None]


@dataclass(frozen=True, slots=True)
class _Matrices:
    """The operands of a product: `[M, K] [K, N]`, a bias, and whether the first has a leading dim of 1."""

    a: Any
    b: Any
    bias: Any
    shape: tuple[int, int, int]  # M, K, N
    transposed: bool = False  # b is [N, K]
    batched: bool = False

    def operands(self, graph: Any) -> tuple[Any, Any]:
        """Write both as matrices."""
        aten = optional("torch", "torch").ops.aten
        a, b = (graph.call_function(aten.squeeze.dim, (v, 0)) if self.batched else v for v in (self.a, self.b))
        return a, graph.call_function(aten.t.default, (b,)) if self.transposed else b

    def work(self, node: Any) -> tuple[float, float, float]:
        """Operations, bytes read, and bytes of the result."""
        m, k, n = self.shape
        size = value(node).dtype.itemsize
        return 2.0 * m * k * n, float((m + n) * k * size), float(m * n * size)


def _static(node: Any) -> tuple[int, ...]:
    found = shape_of_node(node)
    if found is None:
        raise PatternUnfit("splits_unknown", node, "its shape has symbols; legal are numbers")
    return found


def _matrices(node: Any) -> _Matrices:
    """The operands of a product."""
    name = node.target.__name__.partition(".")[0]
    bias, transposed = None, False
    if name == "addmm":
        bias, a, b = node.args[:3]
        if any(node.kwargs.get(k, 1) != 1 for k in ("alpha", "beta")) or len(_static(bias)) != 1:
            raise PatternUnfit("effect_between", node, "it scales, or adds more than a bias")
    elif name == "linear":
        a, b, bias = (*node.args, None)[:3]
        transposed = True
    else:
        a, b = node.args[:2]
    one, other = _static(a), _static(b)
    batched = name == "bmm"
    if batched:
        if one[0] != 1:
            raise PatternUnfit("splits_unknown", node, f"{one[0]} products; legal is one, whose rows or columns go out")
        one, other = one[1:], other[1:]
    if len(one) != 2:
        raise PatternUnfit("splits_unknown", node, f"an operand of {len(one)} dims; legal are 2")
    if bias is not None and tuple(_static(bias)) != (other[0] if transposed else other[-1],):
        raise PatternUnfit("effect_between", node, "its bias is broadcast; legal is one of every column")
    columns = 1 if len(other) == 1 else other[0] if transposed else other[1]
    return _Matrices(a, b, bias, (one[0], one[1], columns), transposed, batched)


def is_thin(node: Any) -> bool:
    """Say whether a product has an operand of at most 16 columns."""
    try:
        found = _matrices(node)
    except PatternUnfit:
        return False
    m, _, n = found.shape
    return found.bias is None and 1 <= min(m, n) <= THIN


def _splits(move: Any, ranks: int) -> tuple[list[int], list[int]]:
    """What is received from, and sent to, each rank, along dim 0."""
    out, into = move.args[1:3]
    for side in (out, into):
        if len(side) != ranks or not all(type(n) is int for n in side):
            raise PatternUnfit("splits_unknown", move, f"splits {list(side)}; legal are {ranks} numbers")
    return list(out), list(into)


def _units(move: Any, node: Any, sizes: Sequence[int], elements: int, each: int) -> list[int]:
    """Sizes along dim 0 of the move as multiples of so many elements."""
    rows = _static(node)[0]
    per = elements // rows if rows else 0
    if any(n * per % each for n in sizes):
        raise PatternUnfit("splits_unknown", move, f"splits of {per} elements cut rows of {each}; legal are whole ones")
    return [n * per // each for n in sizes]


def _numbers(node: Any, between: Sequence[Any], known: dict[Any, Any], elements: int, last: Any) -> Any:
    if elements > MOST_ELEMENTS:
        raise PatternUnfit("splits_unknown", node, f"{elements} elements; layouts are followed up to {MOST_ELEMENTS}")
    found = propagate_indices(between, known, last)
    if found is None:
        raise PatternUnfit("splits_unknown", last, "its layout cannot be followed")
    return found.reshape(-1)


def gemm_match(ends: Sequence[Any], between: Sequence[Any], move: Any, wait: Any, ranks: int) -> GraphMatch:
    """Return the match of a product and an all-to-all; raises `PatternUnfit`."""
    torch, found = optional("torch", "torch"), tables()
    if len(ends) != 1:
        raise PatternUnfit("effect_between", ends[1], "several products are sent at once; legal is one")
    x = _matrices(ends[0])
    m, _, n = x.shape
    acts = [node for node in between if node.target in found.activations]
    if len(acts) > 1 or any(node.kwargs.get("approximate", "none") != "none" for node in acts):
        raise PatternUnfit("effect_between", acts[-1], "legal is one activation: relu, gelu as it is, or silu")
    activation = found.activations[acts[0].target] if acts else "none"
    out, into = _splits(move, ranks)
    own = torch.arange(m * n, dtype=torch.int32).view(_static(ends[0]))
    sent = _numbers(ends[0], between, {ends[0]: own}, m * n, move.args[0])
    if torch.equal(sent, own.reshape(-1)):
        scatter, send = 0, _units(move, move.args[0], into, m * n, n)
        receive = _units(move, move.args[0], out, m * n, n)
    elif n % ranks == 0 and torch.equal(sent, own.view(m, ranks, n // ranks).permute(1, 0, 2).reshape(-1)):
        scatter, send = 1, [n // ranks] * ranks
        if len({*into}) > 1:
            raise PatternUnfit("splits_unknown", move, f"splits {into} of columns; legal are equal ones")
        receive = _units(move, move.args[0], out, m * n, n // ranks)
    else:
        raise PatternUnfit("splits_unknown", move, "it sends neither blocks of rows nor blocks of columns")

    def write(graph: Any, way: FusedVariant) -> None:
        aten, op = torch.ops.aten, torch.ops.shardplan.gemm_all_to_all.default
        with graph.inserting_before(move):
            args = (*x.operands(graph), x.bias, move.args[3], activation, scatter, send, receive, way.tiles)
            new = graph.call_function(op, args)
            new = graph.call_function(aten.view.default, (new, list(_static(wait))))
        _replace_node(graph, wait, new, [wait, move, *reversed(between), ends[0]])

    flops, read, written = x.work(ends[0])
    return GraphMatch("product", flops, read, written, written, 0.0, 0.0, write)


def _product_alone(ends: Sequence[Any], between: Sequence[Any]) -> _Matrices:
    """The one product whose sum is moved, with nothing else but layouts between."""
    if acts := [node for node in between if node.target in tables().activations]:
        raise PatternUnfit("effect_between", acts[0], "it stands between the product and its sum; legal is nothing")
    if len(ends) != 1:
        raise PatternUnfit("effect_between", ends[1], "several products are summed at once; legal is one")
    return _matrices(ends[0])


def scatter_match(ends: Sequence[Any], between: Sequence[Any], move: Any, wait: Any, ranks: int) -> GraphMatch:
    """Return the match of a product and a reduce-scatter of its rows; raises `PatternUnfit`."""
    torch, x = optional("torch", "torch"), _product_alone(ends, between)
    m, _, n = x.shape
    if x.bias is not None:
        raise PatternUnfit("effect_between", ends[0], "every rank adds a bias; legal is none")
    own = torch.arange(m * n, dtype=torch.int32).view(_static(ends[0]))
    sent = _numbers(ends[0], between, {ends[0]: own}, m * n, move.args[0])
    if m % ranks or not torch.equal(sent, own.reshape(-1)):
        raise PatternUnfit("splits_unknown", move, "it cuts other dims than the rows of the product")

    def write(graph: Any, way: FusedVariant) -> None:
        op = torch.ops.shardplan.gemm_reduce_scatter.default
        with graph.inserting_before(move):
            new = graph.call_function(op, (*x.operands(graph), move.args[-1]))
            new = graph.call_function(torch.ops.aten.view.default, (new, list(_static(wait))))
        _replace_node(graph, wait, new, [wait, move, *reversed(between), ends[0]])

    flops, read, written = x.work(ends[0])
    return GraphMatch("product", flops, read, written, written, 0.0, float(m * n * ADDEND), write)


def grouped_match(ends: Sequence[Any], between: Sequence[Any], move: Any, wait: Any, ranks: int) -> GraphMatch:
    """Products of several experts: always a `PatternUnfit`, as a graph says how many rows go to whom, not whose."""
    text = "how many rows of which expert go to whom no graph says; legal is a call of grouped_gemm_all_to_all"
    raise PatternUnfit("splits_unknown", ends[0], text)


def gather_match(ends: Sequence[Any], between: Sequence[Any], move: Any, wait: Any, ranks: int) -> GraphMatch:
    """Return the match of an all-gather and a product of its rows; raises `PatternUnfit`."""
    product = ends[0]
    torch, x = optional("torch", "torch"), _matrices(product)
    m, k, _ = x.shape
    whole = _static(wait)
    own = torch.arange(math.prod(whole), dtype=torch.int32).view(whole)
    if x.a is not wait and x.a not in between:
        raise PatternUnfit("splits_unknown", product, "what it reads second is gathered; legal is what it reads first")
    came = _numbers(wait, between, {wait: own}, m * k, x.a)
    if not torch.equal(came, own.reshape(-1)):
        raise PatternUnfit("splits_unknown", product, "its rows are not those of rank after rank")

    def write(graph: Any, way: FusedVariant) -> None:
        aten, op = torch.ops.aten, torch.ops.shardplan.all_gather_gemm.default
        with graph.inserting_before(product):
            read, b = x.operands(graph)
            if read is not x.a:
                graph.erase_node(read)
            a = graph.call_function(aten.reshape.default, (move.args[0], [m // ranks, k]))
            new = graph.call_function(op, (a, b, move.args[-1]))
            new = graph.call_function(operator.getitem, (new, 0))
            if x.bias is not None:
                new = graph.call_function(aten.add.Tensor, (new, x.bias))
            new = graph.call_function(aten.view.default, (new, list(_static(product))))
        _replace_node(graph, product, new, [product, *reversed(between), wait, move])

    flops, read, written = x.work(product)
    return GraphMatch("product", flops, read, written, float(m * k * value(wait).dtype.itemsize), 0.0, 0.0, write)


def gemv_match(ends: Sequence[Any], between: Sequence[Any], move: Any, wait: Any, ranks: int) -> GraphMatch:
    """Return the match of a thin product and a sum; raises `PatternUnfit`."""
    torch, x = optional("torch", "torch"), _product_alone(ends, between)
    m, _, n = x.shape
    own = torch.arange(m * n, dtype=torch.int32).view(_static(ends[0]))
    _numbers(ends[0], between, {ends[0]: own}, m * n, move.args[0])  # what is summed is made of the product alone
    turned = n > THIN or (m <= THIN and m < n)  # the thin one comes first

    def write(graph: Any, way: FusedVariant) -> None:
        aten, op = torch.ops.aten, torch.ops.shardplan.gemv_all_reduce.default

        def call(target: Any, *args: Any) -> Any:
            return graph.call_function(target, args)

        with graph.inserting_before(ends[0]):
            a, b = x.operands(graph)
            if turned:
                new = call(op, call(aten.t.default, b), call(aten.t.default, a), move.args[2], way.kind)
                new = call(aten.clone.default, call(aten.t.default, new))
            else:
                new = call(op, a, b, move.args[2], way.kind)
            new = call(aten.view.default, new, list(_static(ends[0])))
        new.meta["val"] = value(ends[0])
        ends[0].replace_all_uses_with(new)
        graph.erase_node(ends[0])
        # A sum of values laid out anew is the sum laid out anew.
        wait.replace_all_uses_with(move.args[0])
        graph.erase_node(wait)
        graph.erase_node(move)

    flops, read, written = x.work(ends[0])
    return GraphMatch("vector", flops, read, written, written, written, float(m * n * ADDEND), write)


def bag_match(ends: Sequence[Any], between: Sequence[Any], move: Any, wait: Any, ranks: int) -> GraphMatch:
    """Return the match of bags of tables and an all-to-all to the ranks of the batch; raises `PatternUnfit`."""
    torch, found = optional("torch", "torch"), tables()
    if acts := [node for node in between if node.target in found.activations]:
        raise PatternUnfit("effect_between", acts[0], "it stands between the bags and the move")
    bags = [_Bags.of(node) for node in ends]
    first, count = bags[0], len(bags)
    for one in bags[1:]:
        if (one.batch, one.dim, one.mode) != (first.batch, first.dim, first.mode):
            raise PatternUnfit("splits_unknown", one.node, "bags of another batch, width or mode; legal are alike")
        if (one.scale is None) != (first.scale is None):
            raise PatternUnfit("splits_unknown", one.node, "bags with and without weights; legal are alike")
    batch, dim = first.batch, first.dim
    elements = batch * dim
    whole = torch.arange(count * elements, dtype=torch.int32).view(count, batch, dim)
    known = {node: (whole[k],) for k, node in enumerate(ends)}
    sent = _numbers(ends[0], between, known, count * elements, move.args[0])
    if not torch.equal(sent, whole.permute(1, 0, 2).reshape(-1)):
        raise PatternUnfit("splits_unknown", move, "its rows are not those of the batch, the tables side by side")
    out, into = _splits(move, ranks)
    send, receive = (_units(move, move.args[0], side, count * elements, count * dim) for side in (into, out))
    if len({*receive}) > 1:
        raise PatternUnfit("splits_unknown", move, f"it gets {receive} bags; legal is as many of every rank")
    mine = receive[0]
    end, shape = _home(wait, mine, ranks, count * dim)

    def write(graph: Any, way: FusedVariant) -> None:
        aten, op = torch.ops.aten, torch.ops.shardplan.embedding_bag_all_to_all.default
        with graph.inserting_before(move):
            indices, offsets, scale = _concatenate_bags(graph, bags)
            parts = (move.args[3], first.mode, [count] * ranks, send)
            new = graph.call_function(op, ([b.table for b in bags], indices, offsets, scale, *parts, None))
        with graph.inserting_before(end):
            if end is wait:  # by rank, as it came
                new = graph.call_function(aten.view.default, (new, [mine, ranks, count * dim]))
                new = graph.call_function(aten.permute.default, (new, [1, 0, 2]))
                new = graph.call_function(aten.clone.default, (new,), {"memory_format": torch.contiguous_format})
            new = graph.call_function(aten.view.default, (new, list(shape)))
        chain = [end]
        while chain[-1] is not wait:
            chain.append(chain[-1].args[0])
        gone = [u for node in ends for u in node.users if u not in between]
        _replace_node(graph, end, new, [*chain, move, *reversed(between), *gone, *reversed(ends)])

    size = value(first.table).dtype.itemsize
    rows = float(sum(one.ids for one in bags))
    made = float(count * elements * size)
    return GraphMatch("bags", rows * dim, rows * (dim * size + 8), made, made, 0.0, 0.0, write)


@dataclass(frozen=True, slots=True)
class _Bags:
    """A call of embedding_bag."""

    node: Any
    table: Any
    indices: Any
    offsets: Any
    scale: Any
    mode: str
    batch: int
    dim: int
    ids: int

    @staticmethod
    def of(node: Any) -> _Bags:
        """Read the arguments; raises `PatternUnfit`."""
        args = dict(zip(("table", "indices", "offsets", "by_count", "mode", "sparse", "scale", "last", "padding"),
                        node.args, strict=False)) | node.kwargs  # fmt: skip
        mode = args.get("mode", 0)
        if mode not in (0, 1):
            raise PatternUnfit("not_sum", node, "the largest of a bag; legal are sum and mean")
        if args.get("padding", -1) != -1:
            raise PatternUnfit("effect_between", node, "rows of padding are left out; legal is none")
        table, ids = _static(args["table"]), _static(args["indices"])
        batch = _static(args["offsets"])[0] - bool(args.get("last", False))
        if len(ids) != 1:
            raise PatternUnfit("splits_unknown", node, f"ids of {len(ids)} dims; legal is 1, with offsets")
        mean = "mean" if mode else "sum"
        return _Bags(node, args["table"], args["indices"], args["offsets"], args.get("scale"), mean, batch, table[1],
                     ids[0])  # fmt: skip


def _concatenate_bags(graph: Any, bags: Sequence[_Bags]) -> tuple[Any, Any, Any]:
    """Write the ids of all tables one after another, with their offsets, table-major, and weights."""
    aten = optional("torch", "torch").ops.aten
    call = graph.call_function
    offsets: list[Any] = []
    before = 0
    for one in bags:
        rows = call(aten.slice.Tensor, (one.offsets, 0, 0, one.batch))
        offsets.append(call(aten.add.Tensor, (rows, before)))
        before += one.ids
    offsets.append(call(aten.new_full.default, (bags[0].offsets, [1], before)))
    indices = call(aten.cat.default, ([one.indices for one in bags],))
    scale = None if bags[0].scale is None else call(aten.cat.default, ([one.scale for one in bags],))
    return indices, call(aten.cat.default, (offsets,)), scale


def _home(wait: Any, mine: int, ranks: int, wide: int) -> tuple[Any, tuple[int, ...]]:
    """The last node, behind the wait, of one chain of layouts, that has bags first and ranks behind; else the wait."""
    torch, found = optional("torch", "torch"), tables()
    own = torch.arange(math.prod(_static(wait)), dtype=torch.int32).view(_static(wait))
    final = own.view(ranks, mine, wide).permute(1, 0, 2).reshape(-1)
    node, known, best = wait, {wait: own}, wait
    while len(node.users) == 1:
        (node,) = node.users
        if node.op != "call_function" or node.target not in found.layouts or len(node.all_input_nodes) > 1:
            break
        now = propagate_indices([node], known, node)
        if now is None or not hasattr(now, "reshape"):
            break
        if torch.equal(now.reshape(-1), final):
            best = node
    return best, _static(best)


def _replace_node(graph: Any, old: Any, new: Any, gone: Sequence[Any]) -> None:
    """Put a node in another one's place, and drop what nobody reads any more."""
    new.meta["val"] = value(old)
    old.replace_all_uses_with(new)
    for node in gone:
        if not node.users and node in graph.nodes:
            graph.erase_node(node)
