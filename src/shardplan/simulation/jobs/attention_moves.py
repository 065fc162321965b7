"""Movements into attention and out of its backward pass, as frameworks run them: beside nothing.

What sequences of a context have of queries, keys and values goes where attention is called, behind the products that
make all three, and the products behind attention's backward pass wait for all of its cotangents: a collective waits for
what was issued before it, and is waited for where it was called (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1;
Transformer Engine's `all_gather` and `a2a` of context parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardplan.core.pattern import Work
from shardplan.simulation.jobs.timing import Node, TimedOp, is_movement


def with_attention_moves(nodes: Sequence[Node]) -> list[Node]:
    """Return ops of which movements into attention wait for each other's values, and products for all out of it."""
    found = [*nodes]
    makers = {r: k for k, node in enumerate(nodes) if isinstance(node, TimedOp) for r in node.results}
    readers: dict[str, list[int]] = {}
    for k, node in enumerate(nodes):
        for name in node.reads if isinstance(node, TimedOp) else ():
            readers.setdefault(name, []).append(k)
    behind: dict[int, int] = {}  # by movement out of attention where that is
    for at, node in enumerate(nodes):
        if not isinstance(node, TimedOp) or not _attends(node):
            continue
        if len(node.results) == 1:
            chains = [_moves_into(name, nodes, makers) for name in node.reads]
            given = [name for name, _ in chains if name in makers]
            for moves in (moves for _, moves in chains if moves):
                found[moves[0]] = _waiting(found[moves[0]], given)
        else:
            chains = [_moves_from(name, nodes, readers) for name in node.results]
            behind |= dict.fromkeys((k for _, moves in chains for k in moves), at)
            moved = [name for name, moves in chains if moves]
            for k in {k for name in moved for k in readers.get(name, ())}:
                found[k] = _waiting(found[k], moved)
    order = sorted(range(len(found)), key=lambda k: (behind.get(k, k), k))
    return [found[k] for k in order]


def _moves_into(name: str, nodes: Sequence[Node], makers: dict[str, int]) -> tuple[str, list[int]]:
    """The value that movements make a value of, and the numbers of these, the first one first."""
    moves: list[int] = []
    while (k := makers.get(name)) is not None and _moves(node := nodes[k]):
        assert isinstance(node, TimedOp)  # as a movement is
        moves.insert(0, k)
        name = node.reads[0]
    return name, moves


def _moves_from(name: str, nodes: Sequence[Node], readers: dict[str, list[int]]) -> tuple[str, list[int]]:
    """What movements make of a value that nothing else reads, and the numbers of these, the first one first."""
    moves: list[int] = []
    while len(mine := readers.get(name, ())) == 1 and _moves(node := nodes[mine[0]]):
        assert isinstance(node, TimedOp)  # as a movement is
        moves.append(mine[0])
        (name,) = node.results
    return name, moves


def _waiting(node: Node, names: Sequence[str]) -> Node:
    """An op that waits for values besides its own."""
    if not isinstance(node, TimedOp):
        return node
    return replace(node, reads=(*node.reads, *(n for n in names if n not in node.reads and n not in node.results)))


def _attends(op: TimedOp) -> bool:
    return isinstance(op.cost.pattern, Work) and op.cost.pattern.kind == "scores"


def _moves(node: Node) -> bool:
    """Whether a node is a movement of one value."""
    return isinstance(node, TimedOp) and is_movement(node) and len(node.reads) == len(node.results) == 1
