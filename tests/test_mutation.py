"""Mutations: broken parts of the package must be caught by the oracle that the laws use."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import oracle
import shardplan as sp
from benchmarks import suites
from exhaustive import PORTABLE, Graph
from shardplan.core import accounting, messages, reference, tensor
from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllGather, AllToAll, Permute, ReduceScatter, collective, general, movement, reduction
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.movement import redistribute
from shardplan.movement.redistribution import choice, emit, search, single_move
from shardplan.plans import certificate

Set = Callable[..., None]


def cases() -> Iterator[tuple[sp.TensorType, sp.TensorType]]:
    """Pairs that between them use every op of movement."""
    for suite in ("s16", "P", "V", "N"):
        for s, t, _ in suites.problems(suite, 21, 25, most_devices=16, most_multiple=1):
            assert isinstance(s, sp.TensorType) and isinstance(t, sp.TensorType)
            yield s, t
    mesh = Mesh(a=2, b=3, c=2)
    for a, b in (("i32[12@(a,b), 12]", "i32[12, 12@(b,a)]"), ("i32[12@c, 12@(a,b)]", "i32[12@(c,b,a), 12]")):
        yield sp.TensorType.parse(a, mesh), sp.TensorType.parse(b, mesh)


def clear() -> None:
    """Forget every plan and box that was cached."""
    for module in (
        redistribute,
        single_move,
        tensor,
        messages,
        accounting,
        choice,
        search,
        certificate,
        collective,
        movement,
        general,
        reference,
    ):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    clear()
    yield
    clear()


def caught() -> bool:
    """Whether T1, T3 or T6, or the certificate against the oracle, fails on some pair."""
    for portable in (False, True):
        for s, t in cases():
            try:
                plan = sp.redistribute(s, t, portable=portable)
                plan.certificate.check()
                if oracle.unsound(plan.program, [t]) is not None:
                    return True
                if plan.certificate.peak_bytes > oracle.bound(s, t):
                    return True
                least = oracle.lower_bound(s, t)
                if not (s.layout.partial or t.layout.partial):
                    if any(g < least[d] for g, d in zip(plan.certificate.received_bytes, sorted(least), strict=True)):
                        return True
            except sp.Infeasible:
                if not portable:
                    return True
            except Exception:
                return True
    return False


def test_nothing_is_caught_without_a_mutation() -> None:
    assert not caught()


def group_order(patch: Set) -> None:
    """Groups of a collective with their axes minor to major: what a gather or scatter over two axes must not do."""
    old = Mesh.group_places
    patch(Mesh, "group_places", lambda self, names: old(self, tuple(names)[::-1]))


def wrong_groups(patch: Set) -> None:
    """Groups over other axes than asked."""
    old = Mesh.group_places

    def turned(self: Mesh, names: Any) -> np.ndarray:
        found = old(self, names)
        return np.roll(found, 1, axis=0) if len(found) == 1 else np.roll(found.reshape(-1), 1).reshape(found.shape)

    patch(Mesh, "group_places", turned)


def order_ignored(patch: Set) -> None:
    """AllToAll that delivers in the order of its axes, whatever `order` says."""
    old = AllToAll.move

    def move(self: AllToAll, shards: Any, t: Any, u: Any) -> Any:
        plain = dataclasses.replace(self, order=())
        return old(plain, shards, t, plain.result(t))

    patch(AllToAll, "move", move)


def permute_keeps(patch: Set) -> None:
    """A permute that moves nothing."""

    def move(self: Permute, shards: Any, t: Any, u: Any) -> Any:
        return [np.resize(x, u.local_shape(k)) for k, x in enumerate(shards)]

    patch(Permute, "move", move)


def permute_shifted(patch: Set) -> None:
    """A permutation whose senders are off by one."""
    old = general.permutation

    def shifted(s: Any, t: Any) -> Any:
        pairs = old(s, t)
        return pairs if pairs is None else (np.roll(pairs[0], 1), pairs[1])

    patch(general, "permutation", shifted)


def permute_dropped(patch: Set) -> None:
    """A planner that forgets its permutes, and a `same` that does not notice."""
    old = choice.chain

    def chain(ops: Any, source: Any) -> Program:
        return old(tuple(op for op in ops if not isinstance(op, Permute)), source)

    patch(choice, "chain", chain)
    same_always(patch)


def same_always(patch: Set) -> None:
    for module in (tensor, choice, single_move, certificate):
        if hasattr(module, "same"):
            patch(module, "same", lambda t, u: t.shape == u.shape)


def too_small_groups(patch: Set) -> None:
    """An `exchange` that takes groups that do not hold the data, and a planner that names them."""
    old, stays = emit.group_axes, messages.stays

    def too_lenient(s: sp.TensorType, t: sp.TensorType, axes: tuple[str, ...]) -> bool:
        even = s.all_even and t.all_even
        return stays(s, t, axes) or (even and set(sorted(messages.moved_atoms(s, t))[1:]) <= set(s.mesh.expand(axes)))

    patch(general, "stays", too_lenient)
    patch(emit, "group_axes", lambda mesh, atoms: old(mesh, atoms[1:]))


def lacking_less(patch: Set) -> None:
    """Bytes that a device lacks, halved."""
    old = messages.lacking
    for module in (messages, collective, movement, general):
        if hasattr(module, "lacking"):
            patch(module, "lacking", lambda s, t: old(s, t) // 2)


def kept_more(patch: Set) -> None:
    """A lower bound that claims too little: what a device holds is counted twice."""
    patch(accounting, "overlap_elements", lambda s, t: messages.overlap_elements(s, t) // 2)


def sys_module(name: str) -> Any:
    import importlib

    return importlib.import_module(name)


def wrong_holder(patch: Set) -> None:
    """Messages from the wrong holder."""
    old = messages.choose
    patch(messages, "choose", lambda want, *rest: old(want[::-1], *rest))


def floor_tiles(patch: Set) -> None:
    """Uneven tiles by n // q: pitfall 10."""
    old = tensor._boxes  # pyright: ignore[reportPrivateUsage]

    def boxes(t: sp.TensorType) -> np.ndarray:
        out = old(t).copy()
        for d, (n, names) in enumerate(zip(t.shape, t.layout.dims, strict=True)):
            if not t.even[d] and len(names) == 1:
                q = t.mesh.span(names[0]).size
                i = t.mesh.coordinate(names[0])
                out[:, d, 0], out[:, d, 1] = i * (n // q), np.where(i == q - 1, n, (i + 1) * (n // q))
        return out

    patch(tensor, "_boxes", boxes)


def reduce_twice(patch: Set) -> None:
    """A reduction that counts the first addend twice."""
    old = reduction.reduce_in_order
    patch(reduction, "reduce_in_order", lambda shards, group, kind: old(shards, [group[0], *group], kind))


def max_for_sum(patch: Set) -> None:
    old = reduction.reduce_in_order
    patch(reduction, "reduce_in_order", lambda shards, group, kind: old(shards, group, "max"))


def scatter_gathers(patch: Set) -> None:
    """A reduce-scatter that gives every device the first device's part."""

    def move(self: ReduceScatter, shards: Any, t: Any, u: Any) -> Any:
        out = list(shards)
        for group in t.mesh.group_places(self.axes):
            total = reduction.reduce_in_order(shards, group, self.reduction)
            first = movement.cut_box(total, t.boxes()[group[0]], u.boxes()[group[0]])
            for m in group:
                out[m] = np.resize(first, u.local_shape(int(m)))
        return out

    patch(ReduceScatter, "move", move)


MUTATIONS = [
    group_order, wrong_groups, order_ignored, permute_keeps, permute_shifted, permute_dropped, same_always,
    too_small_groups, lacking_less, wrong_holder, floor_tiles, reduce_twice, max_for_sum, scatter_gathers,
]  # fmt: skip


def planner_takes_anything(patch: Set) -> None:
    """With a `same` that always agrees, a planner that stops at its first type."""
    same_always(patch)
    patch(choice, "chain", lambda ops, source: Program({"0": source}, (), ("0",)))


@pytest.mark.parametrize("mutate", [*MUTATIONS, planner_takes_anything], ids=lambda f: f.__name__)
def test_a_mutation_is_caught(mutate: Callable[[Set], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch.setattr)
    clear()
    assert caught(), f"{mutate.__name__} is not noticed"


def test_a_lower_bound_that_is_too_low_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lower_bound_bytes` is compared with boxes written out, so that the floor cannot be claimed too easily."""
    kept_more(monkeypatch.setattr)
    noticed = 0
    for s, t in cases():
        if s.layout.partial or t.layout.partial:
            continue
        least = oracle.lower_bound(s, t)
        claimed = sp.redistribute(s, t).certificate.lower_bound_bytes
        noticed += list(claimed) != [least[d] for d in sorted(least)]
    assert noticed


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_search_that_prunes_too_much_is_noticed(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """T8 against a heuristic that is not admissible."""
    old = search.Objective.floor
    mesh = Mesh(a=2, b=2, c=2)
    graph = Graph(sp.TensorType("f32", (16, 16), (), mesh))
    rng = random.Random(2)
    pairs = [rng.sample(graph.even, 2) for _ in range(60)]

    def above() -> int:
        clear()
        count = 0
        for s, t in pairs:
            bound = oracle.bound(s, t)
            best = graph.cheapest(s, t, bound, PORTABLE, even=True)
            count += oracle.cost(sp.redistribute(s, t, portable=True).program, bound) > best * (1 + 1e-9)
        return count

    assert above() == 0
    monkeypatch.setattr(search.Objective, "floor", lambda *a: old(*a) * factor)
    assert above() > 0


def broken(op: Any, kind: type) -> Any:
    """An op with its axes turned round, or None."""
    if isinstance(op, kind) and len(getattr(op, "axes", ())) > 1:
        return dataclasses.replace(op, axes=tuple(reversed(op.axes)), **({"order": ()} if kind is AllToAll else {}))
    return None


@pytest.mark.parametrize("kind", [AllGather, AllToAll, Permute])
def test_a_tampered_program_is_unsound(kind: type) -> None:
    """The oracle sees a dropped permute and a turned all-to-all in programs that type."""
    rng = random.Random(1)
    seen = 0
    for suite in ("P", "s16", "S"):
        for s, t, _ in suites.problems(suite, 31, 60, most_devices=16, most_multiple=1):
            assert isinstance(s, sp.TensorType) and isinstance(t, sp.TensorType)
            plan = sp.redistribute(s, t, portable=rng.random() < 0.5)
            for k, step in enumerate(plan.program.steps):
                if not isinstance(step.op, kind):
                    continue
                op = broken(step.op, kind)
                steps = [*plan.program.steps]
                if op is not None:
                    steps[k] = Step(op, step.operands, step.results)
                elif kind is Permute and k == len(steps) - 1:
                    steps = steps[:-1]
                else:
                    continue
                outputs = plan.program.outputs if op is not None else step.operands
                try:
                    program = Program(plan.program.inputs, steps, outputs)
                except sp.ShardplanError:
                    seen += 1  # refused by a typing rule
                    continue
                if sp.same(program.output_types[0], t):
                    continue
                assert oracle.unsound(program, [t]) is not None
                seen += 1
    assert seen
