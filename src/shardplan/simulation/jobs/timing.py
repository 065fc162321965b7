"""`TimedOp` and `TimedLoop`: the ops of a program with what they take and on which stream; here alone an op is priced.

An op that takes part in nothing and takes no time, such as a view, is issued by nobody; it hands on when its operands
are there. A `together` is one op; what computes beside its messages is on the stream of compute, for both are busy.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardplan.core.nested import as_nested
from shardplan.core.op import Op
from shardplan.core.pattern import AtOnce, Groups, InTurn, Local, Overlap, Pattern, Work, communicates
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.hardware.prices.cost import Price, price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.simulation.jobs.settings import JobSettings
from shardplan.strategy.held_cuts import SHARING

EXCHANGED = tuple(axis for of, axis in SHARING.items() if of != "context")  # axes over which tokens are exchanged
COMPUTE, COPY = "compute", "copy"
PARAMETERS = "parameters"  # of streams on which parameters are gathered, and their gradients reduced


@dataclass(frozen=True, slots=True, eq=False)
class OpCost:
    """What an op takes wherever its devices lie alike, and where it runs."""

    seconds: float
    stream: str  # `compute`, or of a collective its axes and the outermost level that it crosses: `tensor, node`
    kind: str
    pattern: Pattern
    price: Price
    received_bytes: int  # on the worst device
    even: bool  # whether all that carry anything of it carry as much: else some devices are done before others
    exchanges: bool = False  # whether tokens go to their experts, or back, where it moves no parameters


@dataclass(frozen=True, slots=True, eq=False)
class TimedOp:
    """An op of a program, by names of values; `number` is that of the step it is in."""

    cost: OpCost
    reads: tuple[str, ...]
    results: tuple[str, ...]
    number: int
    issued: bool  # by a host


def is_movement(op: TimedOp) -> bool:
    """Say whether an op moves values between devices, and does no more."""
    return op.cost.stream != COMPUTE and not isinstance(op.cost.pattern, Work)


@dataclass(frozen=True, slots=True, eq=False)
class TimedLoop:
    """A body that runs again and again: the ops run a run early, and the others.

    `enters`, `carried` and `stacked` are pairs (name outside, name inside): of what it reads, with what it begins
    anew, of what a run leaves to the next and at the end, and of rows.
    """

    times: int
    early: tuple[TimedOp | TimedLoop, ...]
    late: tuple[TimedOp | TimedLoop, ...]
    enters: tuple[tuple[str, str], ...]
    carried: tuple[tuple[str, str], ...]  # names inside: where it enters, and as what it leaves
    results: tuple[tuple[str, str], ...]
    number: int


Node = TimedOp | TimedLoop


@dataclass(slots=True)
class Pricing:
    """Prices ops on one fabric, where devices of a mesh lie as `place` says; `known` are remembered prices."""

    fabric: Fabric
    settings: JobSettings
    place: Hashable = None
    known: dict[Hashable, OpCost] | None = field(default_factory=dict["Hashable", "OpCost"])

    def cost(self, op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> OpCost:
        """Return what an op takes on operands of these types; remembered by op, types and place."""
        key = (self.place, op, operands)
        found = None if self.known is None else self.known.get(key)
        if found is None:
            found = self._priced(op, operands, results)
            if self.known is not None:
                self.known[key] = found
        return found

    def _priced(self, op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> OpCost:
        pattern = op.pattern(*operands)
        cost = price(pattern, self.fabric, self.settings.algorithm)
        names = {op.name}
        stream, received = COMPUTE, 0
        if communicates(pattern):
            received = int(op.received_bytes(*operands).max(initial=0))
            # An axis that is split into sub-axes is one.
            axes = tuple(dict.fromkeys(a.partition(".")[0] for a in op.members(operands[0]))) if operands else ()
            level = level_of(cost, self.fabric)
            names |= {*axes, level}
            stream = COMPUTE if works(pattern) else f"{'.'.join(axes) or 'messages'}, {level}"
        free = not names.isdisjoint(self.settings.free)
        seconds = 0.0 if free else cost.seconds
        exchanges = stream != COMPUTE and any(map(takes_tokens, operands, results))
        return OpCost(seconds, stream, op.name, pattern, cost, received, _even(cost), exchanges)

    def reprice(self, pattern: Work | Groups, like: OpCost) -> OpCost:
        """Return what a kernel or a collective takes that does the work of several, called and where one of them is."""
        cost = price(pattern, self.fabric, self.settings.algorithm)
        axes, _, level = like.stream.partition(", ")
        free = not {like.kind, level, *axes.split(".")}.isdisjoint(self.settings.free)
        seconds = 0.0 if free else cost.seconds
        return replace(like, seconds=seconds, pattern=pattern, price=cost)

    def nodes(self, program: Program) -> tuple[Node, ...]:
        """Return the ops of a program in order, in bodies what is run early apart."""
        return tuple(self._node(program, step, number) for number, step in enumerate(program.steps))

    def _node(self, program: Program, step: Step, number: int) -> Node:
        op = as_nested(step.op)
        operands, results = program.step_types(step)
        if op is None or op.at_once or op.overlaps:
            cost = self.cost(step.op, operands, results)
            issued = cost.price.seconds > 0 or cost.stream != COMPUTE
            return TimedOp(cost, step.operands, step.results, number, issued)
        body = op.body
        inner = [self._node(body, s, k) for k, s in enumerate(body.steps)]
        names = [name for name, _ in body.inputs]
        carried = tuple(zip(names[: op.carried_count], body.outputs[: op.carried_count], strict=True))
        enters, results = (
            tuple(zip(step.operands, names, strict=True)),
            tuple(zip(step.results, body.outputs, strict=True)),
        )
        return TimedLoop(op.times, tuple(inner[: op.ahead]), tuple(inner[op.ahead :]), enters, carried, results, number)


def takes_tokens(before: TensorType, after: TensorType) -> bool:
    """Say whether tokens go to their experts between two types of an activation, or back.

    An axis of experts has another dim then; or it is that of data replicas, over which all tokens of a layer are
    gathered, and sums of what experts made scattered. Over a context tokens are gathered, and heads exchanged.
    """
    had, has = (
        {axis.partition(".")[0]: dim for dim, axes in enumerate(t.layout.dims) for axis in axes}
        for t in (before, after)
    )
    if any(axis in had and axis in has and had[axis] != has[axis] for axis in EXCHANGED):
        return not (before.layout.partial or after.layout.partial)
    return (SHARING["data"] in had) != (SHARING["data"] in has)


def copying(kind: str, nbytes: int, settings: JobSettings) -> TimedOp:
    """Return a copy to the host, or back."""
    seconds = 0.0 if kind in settings.free else nbytes / settings.host_bytes_per_second
    cost = Price("copy", 0.0, seconds, (), own=seconds)
    return TimedOp(OpCost(seconds, COPY, kind, Local(nbytes), cost, 0, even=True), (), (), 0, issued=True)


def level_of(cost: Price, fabric: Fabric) -> str:
    """Return the name of the outermost level that bytes cross; of none the innermost."""
    crossed = [w.level.name for w, n in zip(fabric.wires, cost.level_bytes, strict=True) if n > 0]
    return crossed[0] if crossed else fabric.wires[-1].level.name


def loaded(cost: OpCost, fabric: Fabric) -> list[str]:
    """Return the levels whose links an op loads."""
    return [w.level.name for w, load in zip(fabric.wires, cost.price.load, strict=False) if load is not None]


def works(pattern: Pattern) -> bool:
    """Say whether a kernel is among what it does."""
    if isinstance(pattern, InTurn | AtOnce):
        return any(works(step.pattern) for step in pattern.steps)
    return isinstance(pattern, Work | Overlap)


def _even(cost: Price) -> bool:
    for seconds in cost.load:
        if seconds is not None and seconds.size:
            used = seconds[seconds > 0]
            if used.size and float(used.min()) < float(used.max()) * (1 - 1e-9):
                return False
    return True


def of_parameters(stream: str) -> bool:
    """Say whether a stream is of movements of parameters and of their gradients."""
    return stream.partition(", ")[0].endswith(f".{PARAMETERS}")


def streams_of(nodes: Sequence[Node]) -> Mapping[str, None]:
    """Return the streams of ops, in order of appearance."""
    found: dict[str, None] = {}
    for node in nodes:
        if isinstance(node, TimedOp):
            found[node.cost.stream] = None
        else:
            found |= streams_of((*node.early, *node.late))
    return found


def issued_of(nodes: Sequence[Node]) -> int:
    """Return how many ops a host issues for them."""
    return sum(
        int(node.issued) if isinstance(node, TimedOp) else node.times * issued_of((*node.early, *node.late))
        for node in nodes
    )
