"""Graphs of torch.fx behind AOT, as the pass sees them: which nodes compute, lay out anew, and move, and what is where.

What layout nodes do is found by running them on the numbers of the elements, so that it does not matter by which views,
transpositions, splits and concatenations a graph says it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from shardplan.errors import optional

MOST_ELEMENTS = 1 << 26  # of a value whose layout is followed
MOST_NODES = 64  # behind a collective


class GraphTables(NamedTuple):
    """The operators of torch that the pass knows."""

    products: frozenset[Any]
    bags: frozenset[Any]
    layouts: frozenset[Any]
    activations: Mapping[Any, str]
    all_to_all: frozenset[Any]
    all_reduce: frozenset[Any]
    reduce_scatter: frozenset[Any]
    all_gather: frozenset[Any]
    grouped: frozenset[Any]
    wait: Any


@cache
def tables() -> GraphTables:
    """Return them; needs torch."""
    torch = optional("torch", "torch")
    aten, c10d = torch.ops.aten, torch.ops._c10d_functional
    names = "view _unsafe_view reshape permute transpose.int t clone contiguous split.Tensor split_with_sizes cat stack"
    names += " unsqueeze squeeze.dim expand alias select.int slice.Tensor"

    def op(name: str) -> Any:
        packet, _, overload = name.partition(".")
        return getattr(getattr(aten, packet), overload or "default")

    activations = {aten.relu.default: "relu", aten.gelu.default: "gelu", aten.silu.default: "silu"}
    return GraphTables(
        frozenset(map(op, ("mm", "addmm", "bmm", "mv", "linear"))),
        frozenset(map(op, ("_embedding_bag", "_embedding_bag_forward_only"))),
        frozenset({*map(op, names.split()), operator.getitem}),
        activations,
        frozenset({c10d.all_to_all_single.default}),
        frozenset({c10d.all_reduce.default}),
        frozenset({c10d.reduce_scatter_tensor.default}),
        frozenset({c10d.all_gather_into_tensor.default}),
        frozenset({op("_grouped_mm")} if hasattr(aten, "_grouped_mm") else ()),
        c10d.wait_tensor.default,
    )


def value(node: Any) -> Any:
    """Return what is known of a node's value."""
    return node.meta.get("val")


def shape_of_node(node: Any) -> tuple[int, ...] | None:
    """Return the shape of a node's value, None where it has symbols or is not known."""
    found = value(node)
    sizes = None if found is None else tuple(found.shape)
    return sizes if sizes is not None and all(type(n) is int for n in sizes) else None


def trace_producers(node: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return what makes a value: the products and bags, the nodes between, and of these what is no layout.

    All in the order of the graph; a walk that meets something else ends there.
    """
    found, between, ends = tables(), dict[Any, None](), dict[Any, None]()
    wanted = found.products | found.bags | found.grouped
    pending = [node]
    while pending and len(between) < MOST_NODES:
        one = pending.pop()
        if one in between or one in ends:
            continue
        if one.op != "call_function":
            continue
        if one.target in wanted:
            ends[one] = None
            continue
        between[one] = None
        pending += one.all_input_nodes
    if any(end.target in found.bags for end in ends):
        ends = {end: None for end in ends if end.target in found.bags}
    between = {one: None for one in between if _leads(one, ends)}
    order = {one: k for k, one in enumerate(node.graph.nodes)}
    strange = [one for one in between if one.target not in found.layouts and one.target not in found.activations]

    def sorted_(nodes: Iterable[Any]) -> list[Any]:
        return sorted(nodes, key=lambda one: order[one])

    return sorted_(ends), sorted_(between), sorted_(strange)


def trace_consumers(node: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the products that read a value, the nodes between, and of these what is no layout; in order."""
    found, between, ends = tables(), dict[Any, None](), dict[Any, None]()
    pending = [node]
    while pending and len(between) < MOST_NODES:
        for user in pending.pop().users:
            if user.target in found.products:
                ends[user] = None
            elif user not in between and (user.target in found.layouts or user.target in found.activations):
                between[user] = None
                pending.append(user)
    every = [one for one in node.graph.nodes if one in between or one in ends]
    return (
        [one for one in every if one in ends],
        [one for one in every if one in between],
        [one for one in every if one.target in found.activations],
    )


def product_between(graph: Any, first: Any, last: Any) -> Any | None:
    """Return a product that stands between two nodes; None where there is none."""
    found, inside = tables(), False
    for node in graph.nodes:
        if node is last:
            return None
        if inside and (node.target in found.products or node.target in found.grouped):
            return node
        inside |= node is first
    return None


def _leads(node: Any, ends: Mapping[Any, None]) -> bool:
    """Whether a node reads one of `ends`, at any distance."""
    pending, seen = list(node.all_input_nodes), set[Any]()
    while pending:
        one = pending.pop()
        if one in ends:
            return True
        if one not in seen and len(seen) < MOST_NODES:
            seen.add(one)
            pending += one.all_input_nodes
    return False


def propagate_indices(between: Sequence[Any], known: dict[Any, Any], last: Any) -> Any | None:
    """Run layout nodes on the numbers of elements; return those of `last`, None where that is not possible.

    `known` has by node an integer tensor of the node's shape. Activations leave every element in its place.
    """
    torch, found = optional("torch", "torch"), tables()
    try:
        for node in between:
            if node in known:
                continue
            args, kwargs = (torch.fx.node.map_arg(side, lambda n: known[n]) for side in (node.args, node.kwargs))
            known[node] = args[0] if node.target in found.activations else node.target(*args, **kwargs)
    except (KeyError, RuntimeError, TypeError):
        return None
    return known.get(last)


def written_between(graph: Any, first: Any, last: Any, read: Sequence[Any]) -> Any | None:
    """Return a node that stands between two others and writes what the first reads; None where there is none."""
    between, roots = False, set(_storages(read))
    for node in graph.nodes:
        if node is last:
            return None
        if node is first:
            between = True
        elif between and _mutates(node) and roots & set(_storages(node.all_input_nodes)):
            return node
    return None


def _mutates(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and bool(schema is not None and schema.is_mutable)


def _storages(nodes: Sequence[Any]) -> Iterator[Any]:
    """Nodes, and those that they are views of."""
    found = tables()
    pending = list(nodes)
    while pending:
        one = pending.pop()
        yield one
        if one.op == "call_function" and one.target in found.layouts:
            pending += one.all_input_nodes
