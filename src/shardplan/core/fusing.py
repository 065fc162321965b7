"""Where a program could be fused: computations and collectives that follow each other, what blocks each pair.

A candidate is an all-to-all, an all-reduce or a reduce-scatter of one value that a product, or bags of embeddings,
make, or a product of what an all-gather brings, perhaps through steps that no kernel has: those are then what blocks
it. A gather or a reduce-scatter beside which another product runs is hidden by that one, and stays. `fusable` finds
candidates in a program and in the bodies of its repeats, `fused_with` rewrites a program, `decompose_fused` takes
fused ops apart again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardplan.core.nested import as_nested
from shardplan.core.op import Op
from shardplan.core.ops.arithmetic import Elementwise, Expand
from shardplan.core.ops.bodies import Repeat
from shardplan.core.ops.fused import (
    AllGatherGemm,
    EmbeddingBagAllToAll,
    Fused,
    GemmAllToAll,
    GemmReduceScatter,
    GemvAllReduce,
    as_fused,
)
from shardplan.core.ops.fused_forms import THIN, unfit
from shardplan.core.ops.layers import Concat, EmbeddingBag
from shardplan.core.ops.movement import AllGather, AllToAll
from shardplan.core.ops.placing import Cast, Reshape
from shardplan.core.ops.products import Einsum
from shardplan.core.ops.reduction import AllReduce, ReduceScatter
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.errors import TypingError, line

FARTHEST = 512  # steps behind a move that are looked at: a recommender has two for each of its tables
DTYPES = ("f32", "bf16", "f16")  # of which there are kernels
Place = tuple[int, ...]  # numbers of steps: of repeats, each in the body of the one before, then of its last step
_THROUGH = (Elementwise, Expand, Reshape, Cast, Concat)  # what may stand between, or blocks there


@dataclass(frozen=True, slots=True)
class FusionPlace:
    """A candidate: the steps of it, by number in the program, or the body, at `place[:-1]`.

    `op` is what it would be and `operands` on what, None where something blocks it: then `reason` is a word of the
    closed set, `blocked` the number of the step that blocks, and `text` says it in words.
    """

    place: Place
    kind: type[Fused]
    steps: tuple[int, ...]
    op: Fused | None
    operands: tuple[str, ...]
    reason: str = ""
    blocked: int = -1
    text: str = ""

    @property
    def move(self) -> int:
        """The number of the step that moves."""
        return self.steps[0 if self.kind.gathers else -1]


def fusable(program: Program, path: Place = (), ahead: int = 0) -> Iterator[FusionPlace]:
    """Yield every candidate of a program, and of the bodies of its repeats, in order; its first steps may run `ahead`.

    >>> from shardplan.core.ops import matmul
    >>> steps = [Step(matmul(), ("a", "b"), ("y",)), Step(AllToAll(0, 1, ("x",)), ("y",), ("z",))]
    >>> p = Program.parse('''program
    ...   mesh x=2
    ...   input %a: f32[8@x, 4]
    ...   input %b: f32[4, 6]
    ...   %y = einsum(%a, %b; spec="mk,kn->mn"): f32[8@x, 6]
    ...   %z = all_to_all(%y; src_dim=0, dst_dim=1, axes=(x)): f32[8, 6@x]
    ...   output %z''')
    >>> [(one.place, one.kind.name, one.steps, one.reason) for one in fusable(p)]
    [((1,), 'gemm_all_to_all', (0, 1), '')]
    """
    makers = {r: k for k, step in enumerate(program.steps) for r in step.results}
    users = Counter((*(o for step in program.steps for o in step.operands), *program.outputs))
    for number, step in enumerate(program.steps):
        if isinstance(step.op, Repeat):
            yield from fusable(step.op.body, (*path, number), step.op.ahead)
            continue
        found = list(_steps_after_gathers(program, makers, number)) if isinstance(step.op, Einsum) else []
        if isinstance(step.op, AllToAll | AllReduce | ReduceScatter):
            found = [_candidate(program, makers, number)]
        for kind, numbers in filter(None, found):
            yield _judge_place(program, users, (*path, number), kind, numbers, ahead)


def _steps_after_gathers(
    program: Program, makers: Mapping[str, int], number: int
) -> Iterator[tuple[type[Fused], tuple[int, ...]]]:
    """The steps from each all-gather to a product that reads it."""
    for name in dict.fromkeys(program.steps[number].operands):
        chain = [number]
        while (k := makers.get(name)) is not None and len(chain) < FARTHEST:
            chain.insert(0, k)
            step = program.steps[k]
            if isinstance(step.op, AllGather):
                yield AllGatherGemm, tuple(chain)
            if not isinstance(step.op, _THROUGH) or len(step.operands) != 1:
                break
            (name,) = step.operands


def _candidate(program: Program, makers: Mapping[str, int], number: int) -> tuple[type[Fused], tuple[int, ...]] | None:
    """The kind, and the steps, of the computation behind a move; None where there is none."""
    behind, pending = {number}, list(program.steps[number].operands)
    ends: set[type[Op]] = set()
    while pending:
        k = makers.get(pending.pop())
        if k is None or k in behind:
            continue
        op = program.steps[k].op
        if isinstance(op, Einsum | EmbeddingBag):
            ends.add(type(op))
            behind.add(k)
        elif isinstance(op, _THROUGH) and len(behind) < FARTHEST:
            behind.add(k)
            pending += program.steps[k].operands
    bags = EmbeddingBag in ends
    if not ends or (bags and Einsum in ends):
        # A product beside bags is made before, and is a table of its own.
        if not bags:
            return None
        behind -= {k for k in behind if isinstance(program.steps[k].op, Einsum)}
    numbers = tuple(sorted(_steps_to_keep(program, behind, number)))
    if isinstance(program.steps[number].op, AllReduce):
        product = [program.steps[k] for k in numbers if isinstance(program.steps[k].op, Einsum)]
        thin = bool(product) and _thin(program, product[0])
        return (GemvAllReduce, numbers) if thin and not bags else None
    if isinstance(program.steps[number].op, ReduceScatter):
        return None if bags else (GemmReduceScatter, numbers)
    return (EmbeddingBagAllToAll if bags else GemmAllToAll), numbers


def _steps_to_keep(program: Program, behind: set[int], number: int) -> set[int]:
    """Of steps behind a move those that only lead to bags or products, or stand right before the move."""
    if not any(isinstance(program.steps[k].op, EmbeddingBag) for k in behind):
        return behind
    keep = {number}
    makers = {r: k for k in behind for r in program.steps[k].results}

    def leads(k: int) -> bool:
        op = program.steps[k].op
        if isinstance(op, EmbeddingBag):
            keep.add(k)
            return True
        found = [leads(makers[o]) for o in program.steps[k].operands if o in makers]
        if any(found):
            keep.add(k)
        return any(found)

    for o in program.steps[number].operands:
        if o in makers:
            leads(makers[o])
    return keep


def _thin(program: Program, step: Step) -> bool:
    """Whether a product has an operand of few columns, and sums something that is sharded."""
    if not isinstance(step.op, Einsum) or len(step.operands) != 2:
        return False
    (one, other), result = step.op.sides
    t = program.types[step.results[0]]
    sizes = dict(zip(result, t.local_shape(0), strict=True))
    columns = [1, 1]
    for c in result:
        for k, (own, rest) in enumerate(((one, other), (other, one))):
            columns[k] *= sizes[c] if c in own and c not in rest else 1
    return 1 <= min(columns) <= THIN and bool(t.layout.partial) and not set(one) & set(other) & set(result)


def _judge_place(
    program: Program, users: Mapping[str, int], place: Place, kind: type[Fused], numbers: tuple[int, ...], ahead: int
) -> FusionPlace:
    """The candidate, with what blocks it."""
    steps = [program.steps[k] for k in numbers]

    def refused(reason: str, blocked: int, text: str) -> FusionPlace:
        return FusionPlace(place, kind, numbers, None, (), reason, blocked, text)

    for k, step in zip(numbers[:-1], steps, strict=False):
        for name in step.results:
            if users.get(name, 0) > 1:
                readers = [j for j, other in enumerate(program.steps) if name in other.operands and j not in numbers]
                where = readers[0] if readers else k
                who = program.steps[where].op.name if readers else "the program, as a result"
                return refused("several_users", where, f"%{name} is read by {who}, too; legal is by the move alone")
    try:
        op, operands = kind.of(steps, dict(program.types))
    except TypingError as error:
        reason = unfit(error) or "effect_between"
        blocked = next((k for k, s in zip(numbers, steps, strict=True) if f" {s.op.name} " in str(error)), numbers[0])
        return refused(reason, blocked, line(str(error)))
    t = program.types[steps[0].results[0]]
    if t.dtype not in DTYPES:
        return refused("dtype", numbers[0], f"{t.dtype}; legal are {', '.join(DTYPES)}")
    if (other := _hiding_step(program, kind, numbers, ahead)) is not None:
        return refused("overlapped", other, "it runs while the move does, which is hidden as it is")
    return FusionPlace(place, kind, numbers, op, operands)


def _hiding_step(program: Program, kind: type[Fused], numbers: tuple[int, ...], ahead: int) -> int | None:
    """A product, or a repeat, that runs while a gather or a reduce-scatter does; None where there is none.

    A gather that runs ahead does so beside what is left of the row before.
    """
    first, last, steps = numbers[0], numbers[-1], program.steps
    if kind.gathers:
        if first < ahead <= last:
            return last
        beside = range(first + 1, last)
    elif kind.move is ReduceScatter:
        (made,), rest = steps[last].results, range(last + 1, len(steps))
        beside = range(last + 1, next((k for k in rest if made in steps[k].operands), len(steps)))
    else:
        return None
    return next((k for k in beside if isinstance(steps[k].op, Einsum | Repeat)), None)


def fused_with(program: Program, chosen: Mapping[Place, tuple[FusionPlace, Fused]]) -> Program:
    """Return a program in which candidates are fused, each as the op beside it; keys are their places."""
    here = {place[0]: one for place, one in chosen.items() if len(place) == 1}
    gone = {k for one, _ in here.values() for k in one.steps[:-1]}
    steps: list[Step] = []
    for number, step in enumerate(program.steps):
        if number in gone:
            continue
        if number in here:
            one, op = here[number]
            step = Step(op, one.operands, step.results)
        deeper = {place[1:]: one for place, one in chosen.items() if len(place) > 1 and place[0] == number}
        if deeper and isinstance(step.op, Repeat):
            lost = {k for place, (one, _) in deeper.items() if len(place) == 1 for k in one.steps[:-1]}
            ahead = sum(k not in lost for k in range(step.op.ahead))
            body = fused_with(step.op.body, deeper)
            step = replace(step, op=replace(step.op, body=body, ahead=ahead))
        steps.append(step)
    return Program(program.inputs, steps, program.outputs)


def decompose_fused(program: Program) -> Program:
    """Return a program with the steps of every fused op in its place: equal types, equal meaning."""
    taken = set(program.types)
    steps: list[Step] = []
    for step in program.steps:
        op = as_fused(step.op)
        inner = as_nested(step.op)
        if op is not None:
            names = dict(zip((name for name, _ in op.body.inputs), step.operands, strict=True))
            names |= zip(op.body.outputs, step.results, strict=True)
            for one in op.body.steps:
                for r in one.results:
                    names.setdefault(r, _unused_name(r, taken))
                given, made = (tuple(names[n] for n in side) for side in (one.operands, one.results))
                steps.append(Step(one.op, given, made, one.stopped))
        elif isinstance(inner, Repeat):
            steps.append(replace(step, op=replace(inner, body=decompose_fused(inner.body))))
        else:
            steps.append(step)
    return Program(program.inputs, steps, program.outputs)


def _unused_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
