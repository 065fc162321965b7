"""`StepTraffic`: movements of an optimizer that frameworks run beside passes of the step.

A gradient that replicas sum once a step, behind the last microbatch, is on its way while the last backward pass goes on
(DDP's buckets, Megatron's `overlap_grad_reduce`); a parameter whose update replicas have dealt out is gathered while
the first forward pass of a step runs (Megatron's `overlap_param_gather`). What a layer has goes together, either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.nested import as_nested
from shardplan.core.pattern import Groups
from shardplan.core.program import Program
from shardplan.simulation.jobs.framework_ops import as_part, names_read, on_parameters
from shardplan.simulation.jobs.timing import Node, Pricing, TimedLoop, TimedOp, is_movement
from shardplan.strategy.partition.programs import NEXT

Chains = Mapping[str, tuple[TimedOp, ...]]


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """By sum of gradients what reduces it, by parameter what gathers it, in order; and the ops of the optimizer."""

    reductions: Chains
    gathers: Chains
    left: tuple[Node, ...]

    @staticmethod
    def of(
        nodes: Sequence[Node], meshes: Sequence[Mesh], totals: Collection[str], parameters: Collection[str]
    ) -> StepTraffic:
        """Return that of an optimizer's ops, of sums and parameters that passes of its own stage make and read."""
        reductions: dict[str, list[TimedOp]] = {}
        gathers: dict[str, list[TimedOp]] = {}
        source = {name: name for name in totals}
        for node in nodes:
            if isinstance(node, TimedOp) and not node.issued and len(node.reads) == 1 and node.reads[0] in source:
                source |= dict.fromkeys(node.results, source[node.reads[0]])  # a view, such as a part of what is whole
            if (op := _collective(node)) is not None and (total := source.get(op.reads[0])) is not None:
                reductions.setdefault(total, []).append(op)
                source[op.results[0]] = total
        into = {NEXT + name: name for name in parameters}
        readers = Counter(name for node in nodes for name in names_read(node))
        for node in reversed(nodes):
            if (op := _collective(node)) is not None and op.results[0] in into and op.reads[0] not in source:
                gathers.setdefault(into[op.results[0]], []).insert(0, op)
                if readers[op.reads[0]] == 1:
                    into[op.reads[0]] = into[op.results[0]]
        gone = {id(op) for chains in (reductions, gathers) for chain in chains.values() for op in chain}
        left = tuple(as_part(node) if isinstance(node, TimedOp) and id(node) in gone else node for node in nodes)
        first, last = (
            {
                name: tuple(replace(op, cost=on_parameters(op.cost, meshes)) for op in chain)
                for name, chain in one.items()
            }
            for one in (reductions, gathers)
        )
        return StepTraffic(first, last, left)


def with_reductions(nodes: Sequence[Node], chains: Chains, pricing: Pricing) -> tuple[Node, ...]:
    """Return the ops of a backward pass that reduces sums of gradients as its layers make them."""
    found: list[Node] = []
    for node in nodes:
        made = [name.removeprefix(NEXT) for name in _results(node) if name.startswith(NEXT)]
        whole = dict.fromkeys(name for name in made if name in chains)
        if isinstance(node, TimedLoop):
            leaves = {inner for _, inner in node.carried}
            rows = {inner: name.removeprefix(NEXT) for name, inner in node.results if inner not in leaves}
            rows = {inner: name for inner, name in rows.items() if name in whole}
            layer = _joined_steps([((inner,), chains[name]) for inner, name in rows.items()], node.times, pricing)
            node = replace(node, late=(*node.late, *layer))
            whole = dict.fromkeys(name for name in whole if name not in rows.values())
        found += [node, *_joined_steps([((NEXT + name,), chains[name]) for name in whole], 1, pricing)]
    return tuple(found)


def with_gathers(nodes: Sequence[Node], program: Program, chains: Chains, pricing: Pricing) -> tuple[Node, ...]:
    """Return the ops of a forward pass that gathers parameters a layer ahead of those that read them."""
    found: list[Node] = []
    left = dict(chains)
    for node in nodes:
        rows: dict[str, str] = {}
        if isinstance(node, TimedLoop):
            op = as_nested(program.steps[node.number].op)
            assert op is not None  # which it was made of
            cut = node.enters[len(node.enters) - op.cut :]
            rows = {inner: outside for outside, inner in cut if outside in left}
        whole = [name for name in dict.fromkeys(names_read(node)) if name in left and name not in rows.values()]
        found += _joined_steps([((), left.pop(name)) for name in whole], 1, pricing, tuple(whole))
        if rows and isinstance(node, TimedLoop):
            layer = [((), left.pop(name)) for name in rows.values()]
            node = replace(node, early=(*node.early, *_joined_steps(layer, node.times, pricing, tuple(rows))))
        found.append(node)
    return tuple(found)


def _joined_steps(
    chains: Sequence[tuple[tuple[str, ...], tuple[TimedOp, ...]]],
    times: int,
    pricing: Pricing,
    results: tuple[str, ...] = (),
) -> list[TimedOp]:
    """The steps of chains that begin with what is read, one op for those over the same groups, in one of `times`."""
    found: list[TimedOp] = []
    reads = tuple(name for names, _ in chains for name in names)
    for step in range(max((len(chain) for _, chain in chains), default=0)):
        alike: dict[tuple[object, ...], list[TimedOp]] = {}
        for op in (op for _, chain in chains for op in chain[step : step + 1]):
            pattern = op.cost.pattern
            assert isinstance(pattern, Groups)  # as `_collective` has it
            groups = pattern.members.shape, pattern.members.tobytes()
            alike.setdefault((op.cost.stream, pattern.kind, *groups), []).append(op)
        made = [
            _joined_collective(ops, reads, (f"once.{step}.{k}",), times, pricing)
            for k, ops in enumerate(alike.values())
        ]
        reads = tuple(name for op in made for name in op.results)
        found += made
    if found and results:
        found.append(replace(as_part(found[-1]), reads=reads, results=results))
    return found


def _joined_collective(
    ops: Sequence[TimedOp], reads: tuple[str, ...], results: tuple[str, ...], times: int, pricing: Pricing
) -> TimedOp:
    """One collective for those over the same groups, of one in `times` of their bytes."""
    patterns = [op.cost.pattern for op in ops if isinstance(op.cost.pattern, Groups)]
    nbytes = np.sum([pattern.nbytes for pattern in patterns], axis=0) / times
    like = replace(ops[0].cost, received_bytes=sum(op.cost.received_bytes for op in ops) // times)
    cost = pricing.reprice(Groups(patterns[0].kind, patterns[0].members, nbytes), like)
    return TimedOp(cost, reads, results, ops[0].number, issued=True)


def _collective(node: Node) -> TimedOp | None:
    """The op of a node, if it is a collective of one value that all libraries have."""
    if not isinstance(node, TimedOp) or not is_movement(node) or len(node.reads) != 1 or len(node.results) != 1:
        return None
    pattern = node.cost.pattern
    return node if isinstance(pattern, Groups) and pattern.composed is None else None


def _results(node: Node) -> Sequence[str]:
    return node.results if isinstance(node, TimedOp) else [outside for outside, _ in node.results]
