"""A program's ops as training frameworks run them, where that is not one op after another.

Gathers of parameters and reductions of gradients have a stream of their own, apart from movements of activations: FSDP2
and Megatron's distributed optimizer post both beside whatever else goes on. What is cast and added behind a reduction
follows it there (FSDP2's `foreach_reduce`, on the reduce-scatter stream). A gradient is cast and added to the sum of
earlier ones by one kernel, wherever it runs (Megatron's `main_grad.add_`). A bias is added in the product that it
follows. A loss, whole or over classes that are dealt out, reads and writes its logits as often as that of a framework
(`LOSS_BYTES`). Our own executors do none of this, and are simulated without it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.nested import as_nested
from shardplan.core.pattern import Work
from shardplan.core.program import Program
from shardplan.simulation.closed.numbers import LOSS_BYTES
from shardplan.simulation.closed.pass_overlap import PassWork, beside_moves
from shardplan.simulation.jobs.attention_moves import with_attention_moves
from shardplan.simulation.jobs.timing import (
    COMPUTE,
    PARAMETERS,
    Node,
    OpCost,
    Pricing,
    TimedLoop,
    TimedOp,
    is_movement,
    of_parameters,
)
from shardplan.strategy.strategy import SHARING

# Axes that copy parameters.
REPLICAS = ("replica", *(part for axis in ("data", "context") for part in (axis, SHARING[axis])))


def as_frameworks(
    nodes: Sequence[Node],
    program: Program,
    pricing: Pricing,
    parameters: Collection[str],
    totals: Collection[str],
    logits: tuple[int, ...] = (),
) -> tuple[Node, ...]:
    """Return the ops of a program as frameworks run them.

    Args:
        nodes: Its ops, as `pricing` gives them.
        program: Whose they are.
        pricing: Prices what becomes one kernel.
        parameters: Inputs that are parameters.
        totals: Results that are sums of gradients.
        logits: The local shape of the logits, where the loss is of this program or of its forward pass.
    """
    block = _Block(program, pricing, {*parameters}, {*totals})
    return block.with_loss(block.ops(nodes), logits)


def as_updates(nodes: Sequence[Node], program: Program, pricing: Pricing) -> tuple[Node, ...]:
    """Return the ops of an optimizer, one after another; what an update makes is cast by the kernel that makes it.

    What an update finds and sums over devices it waits for; gradients come, and parameters go, beside other updates.
    """
    found = [*nodes]
    makers: dict[str, int] = {}
    for k, node in enumerate(nodes):
        if not isinstance(node, TimedOp) or not _streams(node):
            continue
        at = makers.get(node.reads[0]) if node.issued and len(node.reads) == 1 else None
        before = None if at is None else found[at]
        if at is not None and isinstance(before, TimedOp) and before.issued:
            works = [one.cost.pattern for one in (before, node)]
            nbytes = sum(w.nbytes for w in works if isinstance(w, Work)) - program.types[node.reads[0]].local_bytes()
            flops = sum(w.flops for w in works if isinstance(w, Work))
            joined = Work(flops, works[0].dtype if isinstance(works[0], Work) else "", nbytes)
            found[at] = replace(before, cost=pricing.reprice(joined, before.cost))
            found[k] = as_part(node)
        else:
            makers |= dict.fromkeys(node.results, k)
    return tuple(_waiting_for_sums(found))


def _waiting_for_sums(nodes: Sequence[Node]) -> list[Node]:
    """Ops of an optimizer of which each waits for the one before it, but for what gradients and parameters move by."""
    ops = [node for node in nodes if isinstance(node, TimedOp)]
    kernels = {id(op) for op in ops if op.issued and not is_movement(op)}
    updated, needed = set[str](), set[str]()  # values behind kernels, and before them
    for op in ops:
        if id(op) in kernels or not updated.isdisjoint(op.reads):
            updated |= {*op.results}
    for op in reversed(ops):
        if id(op) in kernels or not needed.isdisjoint(op.results):
            needed |= {*op.reads}
    found = [*nodes]
    last: tuple[str, ...] = ()
    for k, op in enumerate(nodes):
        if isinstance(op, TimedOp) and op.issued and (id(op) in kernels or updated & needed & {*op.results}):
            found[k], last = replace(op, reads=(*op.reads, *last)), op.results[:1]
    return found


def beside_collectives(nodes: Sequence[Node], processors: int) -> tuple[Node, ...]:
    """Return ops whose products and attention lose the processors that collectives beside them keep.

    Beside them are movements of parameters and their gradients: those of one run of a loop, or between two loops, as
    the closed form has them (`pass_overlap.beside_moves`).

    Args:
        nodes: Ops as frameworks run them.
        processors: Those of a device; 0 where they are not known, and nothing is lost.
    """
    found: list[Node] = []
    run: list[TimedOp] = []  # of ops since the last loop
    for node in nodes:
        if isinstance(node, TimedOp):
            run.append(node)
            continue
        body = beside_collectives((*node.early, *node.late), processors)
        loop = replace(node, early=body[: len(node.early)], late=body[len(node.early) :])
        found += [*_slow_products(run, processors), loop]
        run = []
    return (*found, *_slow_products(run, processors))


def _slow_products(ops: Sequence[TimedOp], processors: int) -> Sequence[TimedOp]:
    """Ops that run beside each other's movements of parameters."""
    kernels = sum(op.cost.seconds for op in ops if op.cost.stream == COMPUTE)
    slowed = sum(op.cost.seconds for op in ops if needs_processors(op))
    moves = sum(op.cost.seconds for op in ops if of_parameters(op.cost.stream) and is_movement(op))
    if not slowed or not moves:
        return ops
    work = PassWork(*(np.array([seconds]) for seconds in (kernels, moves, 0.0)))
    lost = float(beside_moves(work, np.array([slowed]), processors).kernels[0]) - kernels
    return [
        replace(op, cost=replace(op.cost, seconds=op.cost.seconds * (1 + lost / slowed)))
        if needs_processors(op)
        else op
        for op in ops
    ]


@dataclass(slots=True)
class _Block:
    """A program, or a body: of its values those made of parameters alone, and results that are sums of gradients."""

    program: Program
    pricing: Pricing
    parameters: set[str]
    totals: set[str]
    readers: Counter[str] = field(default_factory=Counter[str])
    behind: dict[str, str] = field(default_factory=dict[str, str])  # by value the stream of the reduction before it
    summed: set[str] = field(default_factory=set[str])  # what only leads to sums of gradients

    def ops(self, nodes: Sequence[Node], carried: Collection[str] = ()) -> tuple[Node, ...]:
        """Return its ops; `carried` are results that go on to the next run."""
        self.readers.update(name for node in nodes for name in names_read(node))
        self.readers.update(self.program.outputs)
        self._follow_parameters(nodes)
        ending = self._ending(nodes, carried)
        self.summed = {r for node in nodes if isinstance(node, TimedOp) and id(node) in ending for r in node.results}
        placed = [self._placed(node, id(node) in ending) for node in nodes]
        return tuple(with_attention_moves(self._fused(placed)))

    def _follow_parameters(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if isinstance(node, TimedOp) and node.reads and self.parameters >= {*node.reads}:
                self.parameters |= {*node.results}

    def _ending(self, nodes: Sequence[Node], carried: Collection[str]) -> set[int]:
        """The ids of ops whose results lead to sums of gradients alone, by kernels alone that cast or add them.

        What gathers cotangents for a table's gradient moves activations: the kernel behind it makes the gradient.
        """
        other = {name for name in self.program.outputs if name not in self.totals or name in carried}
        found: set[int] = set()
        for node in reversed(nodes):
            ends = isinstance(node, TimedOp) and (is_movement(node) or (_streams(node) and self._keeps_shape(node)))
            if ends and other.isdisjoint(node.results):
                found.add(id(node))
            else:
                other |= {*names_read(node)}
        return found

    def _keeps_shape(self, op: TimedOp) -> bool:
        """Say whether a kernel makes what has the shape of an operand."""
        step = self.program.steps[op.number]
        shapes = {self.program.types[name].shape for name in step.operands}
        return not op.issued or all(self.program.types[name].shape in shapes for name in step.results)

    def _placed(self, node: Node, ends: bool) -> Node:
        """An op on the stream that frameworks give it."""
        if isinstance(node, TimedLoop):
            return self._loop(node)
        if is_movement(node) and (ends or {*node.results} <= self.parameters):
            node = replace(node, cost=on_parameters(node.cost, self.program.meshes))
        stream = (
            node.cost.stream
            if is_movement(node)
            else next((self.behind[r] for r in node.reads if r in self.behind), "")
        )
        if ends and stream:
            self.behind |= dict.fromkeys(node.results, stream)
            if node.issued and not is_movement(node):
                node = replace(node, cost=replace(node.cost, stream=stream))
        return node

    def _loop(self, loop: TimedLoop) -> TimedLoop:
        op = as_nested(self.program.steps[loop.number].op)
        assert op is not None  # which it was made of
        parameters = {inside for outside, inside in loop.enters if outside in self.parameters}
        totals = {inside for outside, inside in loop.results if outside in self.totals}
        inner = _Block(op.body, self.pricing, parameters, totals)
        ops = inner.ops((*loop.early, *loop.late), {leaves for _, leaves in loop.carried})
        count = len(loop.early)
        return replace(loop, early=ops[:count], late=ops[count:])

    def _fused(self, nodes: Sequence[Node]) -> list[Node]:
        """Ops of which those that read one value of the one before them, alone, are one kernel with it."""
        makers: dict[str, int] = {}
        found = [*nodes]
        for k, node in enumerate(nodes):
            if not isinstance(node, TimedOp):
                continue
            for name in node.reads if node.issued and _streams(node) else ():
                before = found[makers[name]] if name in makers and self.readers[name] == 1 else None
                if not isinstance(before, TimedOp) or not before.issued:
                    continue
                joins = node.cost.stream != COMPUTE or len(before.reads) == 1
                if name in self.summed and joins and _streams(before) and before.cost.stream == node.cost.stream:
                    found[k] = self._with(node, before, name)
                    found[makers[name]] = as_part(before)
                    break
                if is_product(before) and self._adds_parameter(node, name):
                    found[k] = as_part(node)
            makers |= dict.fromkeys(node.results, k)
        return found

    def with_loss(self, nodes: Sequence[Node], logits: tuple[int, ...]) -> tuple[Node, ...]:
        """Return ops of which those on the logits, but for products, move as much as the loss of a framework does."""
        at: dict[int, Work] = {}
        for k, node in enumerate(nodes if logits else ()):
            if isinstance(node, TimedOp) and node.issued and isinstance(work := node.cost.pattern, Work):
                shapes = (self.program.types[name].local_shape(0) for name in (*node.reads, *node.results))
                if work.kind != "product" and logits in shapes:
                    at[k] = work
        backward = "loss" not in self.program.outputs
        scale = LOSS_BYTES[""][backward] * math.prod(logits) / max(1.0, sum(float(w.nbytes) for w in at.values()))
        found = [*nodes]
        for k, work in at.items():
            node = found[k]
            assert isinstance(node, TimedOp)  # as it was found
            found[k] = replace(node, cost=self.pricing.reprice(replace(work, nbytes=work.nbytes * scale), node.cost))
        return tuple(found)

    def _adds_parameter(self, op: TimedOp, name: str) -> bool:
        """Say whether an op adds a parameter to a value, and does no more."""
        work, others = op.cost.pattern, [r for r in op.reads if r != name]
        elements = self.program.types[name].local_bytes() / self.program.types[name].itemsize
        adds = isinstance(work, Work) and float(work.flops) <= elements
        return adds and len(others) == 1 and others[0] in self.parameters

    def _with(self, op: TimedOp, before: TimedOp, name: str) -> TimedOp:
        """An op and the one before it as one kernel, which neither writes nor reads the value between."""
        works = [one.cost.pattern for one in (before, op)]
        first, second = works
        assert isinstance(first, Work) and isinstance(second, Work)
        nbytes = first.nbytes + second.nbytes - 2 * self.program.types[name].local_bytes()
        cost = self.pricing.reprice(Work(first.flops + second.flops, second.dtype, nbytes), op.cost)
        return replace(op, cost=cost, reads=(*before.reads, *(r for r in op.reads if r != name)))


def as_part(op: TimedOp) -> TimedOp:
    """Return an op that another one does: it takes no time of its own, and no host issues it."""
    return replace(op, issued=False, cost=replace(op.cost, seconds=0.0))


def on_parameters(cost: OpCost, meshes: Sequence[Mesh]) -> OpCost:
    """Return what a movement takes, on the stream of movements of parameters and their gradients.

    Those between replicas are on one stream at each level, whatever axes they are over: side by side they would have
    the links twice.
    """
    axes, _, level = cost.stream.partition(", ")
    replicas = [a for mesh in meshes for a in mesh.axes if a in REPLICAS]
    axes = axes if {*axes.split(".")}.isdisjoint(replicas) else ".".join(dict.fromkeys(replicas))
    return replace(cost, stream=f"{axes}.{PARAMETERS}, {level}")


def names_read(node: Node) -> Sequence[str]:
    """Return the values that an op or a loop reads."""
    return node.reads if isinstance(node, TimedOp) else [outside for outside, _ in node.enters]


def _streams(op: TimedOp) -> bool:
    """Say whether an op does nothing, or is a kernel that reads and writes its operands once."""
    return not op.issued or (isinstance(op.cost.pattern, Work) and op.cost.pattern.kind == "streamed")


def needs_processors(op: TimedOp) -> bool:
    """Say whether an op is a product or attention, which all processors of a device work at."""
    return isinstance(op.cost.pattern, Work) and op.cost.pattern.kind in ("product", "scores")


def is_product(op: TimedOp) -> bool:
    """Say whether an op is a product."""
    return isinstance(op.cost.pattern, Work) and op.cost.pattern.kind == "product"
