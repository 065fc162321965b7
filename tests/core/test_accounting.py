"""Bytes of programs against counts written out value by value and device by device."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import shardplan as sp
import strategies as some
from oracle import held_bytes
from shardplan.core.accounting import account, bound_bytes, lower_bound
from shardplan.core.ops import AllGather, Einsum, Elementwise, Reshape, Send, Sgd, Slice
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.core.step import Step
from shardplan.movement.redistribute import plan_kept
from shardplan.simulation.predict import predict

Pair = tuple[sp.TensorType, sp.TensorType]


@settings(max_examples=120, deadline=None)
@given(st.one_of(some.pairs(("even", "uneven", "partial", "rooted"), most=12), some.cross_pairs(most=8)), st.booleans())
def test_a_plan_is_booked_right(pair: Pair, portable: bool) -> None:
    try:
        program = sp.redistribute(*pair, portable=portable).program
    except sp.Infeasible:
        return
    books = account(program)
    chain = [program.types["0"], *(program.types[s.results[0]] for s in program.steps)]
    assert books.devices == program.devices
    assert books.peak_bytes == max(held_bytes(t, d) for t in chain for d in program.devices)
    received = dict.fromkeys(program.devices, 0)
    for k, step in enumerate(program.steps):
        got = step.op.received_bytes(chain[k]).tolist()
        relabels = isinstance(step.op, Send) and sp.same(chain[k], chain[k + 1])  # the result is the operand's storage
        live = max(held_bytes(chain[k], d) + held_bytes(chain[k + 1], d) * (not relabels) for d in program.devices)
        assert books.step_workspaces[k] == live + step.op.staging(chain[k])
        assert books.step_received[k] == max(got) and books.rounds[k] == step.op.rounds(chain[k])
        for d, n in zip(chain[k + 1].mesh.devices, got, strict=True):
            received[d] += n
    assert books.received.tolist() == [received[d] for d in program.devices]
    assert books.workspace_bytes == max([max(held_bytes(chain[0], d) for d in program.devices), *books.step_workspaces])


@settings(max_examples=150, deadline=None)
@given(some.batches())
def test_the_bound_is_the_larger_sum_of_ends(batch: tuple[list[sp.TensorType], list[sp.TensorType]]) -> None:
    devices = {d for side in batch for t in side for d in t.mesh.devices}
    assert bound_bytes(*batch) == max(sum(held_bytes(t, d) for t in side) for side in batch for d in devices)


@settings(max_examples=150, deadline=None)
@given(some.pairs(("partial", "rooted")))
def test_lower_bounds_of_partial_and_rooted_types(pair: Pair) -> None:
    s, t = pair
    got = lower_bound(s, t, tuple(sorted(s.mesh.devices))).tolist()
    marks = [set(x.mesh.expand(x.layout.partial)) for x in pair]
    by_id = oracle.lower_bound(s, t)
    for d, n in zip(sorted(s.mesh.devices), got, strict=True):
        place = t.mesh.devices.index(d)
        if not oracle.at_root(t, place):
            assert n == 0
        elif (not marks[0] and not marks[1]) or (marks[0] == marks[1] and s.layout.reduction == t.layout.reduction):
            assert n == by_id[d]
        elif marks[1]:
            assert n == 0
        elif marks[0]:
            assert 0 <= n <= held_bytes(t, d)


def test_values_that_nobody_reads_are_freed() -> None:
    mesh = sp.Mesh(x=2)
    t, u = sp.TensorType("f32", (8,), ("x",), mesh), sp.TensorType("f32", (8,), (None,), mesh)
    steps = [
        Step(AllGather(0, ("x",)), ("a",), ("big",)),  # 16 + 16 -> 32, then freed: never read
        Step(Slice(0, ("x",)), ("b",), ("c",)),
    ]
    books = account(Program({"a": t, "b": u}, steps, ("a", "c")))
    assert books.step_workspaces == (16 + 32 + 32, 16 + 32 + 16)
    assert books.peak_bytes == 16 + 32
    assert account(Program({"a": t, "b": u}, [], ("a",))).peak_bytes == 16 + 32


def test_an_input_that_is_an_output_too_counts_to_the_end() -> None:
    """A kept source: 16 of it, 32 gathered from it, and 16 cut from that, until the end."""
    mesh = sp.Mesh(x=2)
    t = sp.TensorType("f32", (8,), ("x",), mesh)
    steps = [Step(AllGather(0, ("x",)), ("a",), ("b",)), Step(Slice(0, ("x",)), ("b",), ("c",))]
    freed, kept = account(Program({"a": t}, steps, ("c",))), account(Program({"a": t}, steps, ("c", "a")))
    assert freed.step_workspaces == (16 + 32, 32 + 16) and kept.step_workspaces == (16 + 32, 16 + 32 + 16)
    assert (freed.peak_bytes, kept.peak_bytes) == (32, 16 + 32)
    assert (freed.input_bytes, kept.input_bytes) == (16, 16)


def test_a_send_of_a_kept_source_copies() -> None:
    """Where it leaves every byte in place it relabels, unless the caller keeps what it would rename."""
    a, b = sp.Mesh(x=2), sp.Mesh(y=2)
    t, u = sp.TensorType("f32", (8,), ("x",), a), sp.TensorType("f32", (8,), ("y",), b)
    steps = [Step(Send(u.layout, b), ("0",), ("1",))]
    assert account(Program({"0": t}, steps, ("1",))).workspace_bytes == 16
    assert account(Program({"0": t}, steps, ("1", "0"))).workspace_bytes == 32


@settings(max_examples=100, deadline=None)
@given(st.one_of(some.pairs(("even", "uneven", "partial", "rooted"), most=12), some.cross_pairs(most=8)))
def test_a_kept_plan_is_booked_right(pair: Pair) -> None:
    """Account, certificate, prediction and the reference agree: the source is there until the end."""
    s, t = pair
    plan = plan_kept(s, t, memory_limit=10**9)
    program, c = plan.program, plan.certificate
    c.check()
    books = account(program)
    chain = [program.types["0"], *(program.types[s.results[0]] for s in program.steps)]
    for k, step in enumerate(program.steps):
        held = {0: chain[0], k: chain[k], k + 1: chain[k + 1]}
        if k and isinstance(step.op, Send) and sp.same(chain[k], chain[k + 1]):
            del held[k]  # the result is the operand's storage
        live = max(sum(held_bytes(x, d) for x in held.values()) for d in program.devices)
        assert books.step_workspaces[k] == live + step.op.staging(chain[k])
    assert c.workspace_bytes == books.workspace_bytes
    assert predict(program).peak_bytes <= c.workspace_bytes
    shards = oracle.spread(oracle.content(s), s, np.random.default_rng(0))
    *_, source = run_reference(program, [shards])
    assert all((x == y).all() for x, y in zip(source, shards, strict=True))


PAIRS = {"sgd": [(0, 0)], "adamw": [(0, 0), (1, 2), (2, 3)], "write": [(0, 0)], "reshape": [(0, 0)], "send": [(0, 0)]}


def held(program: Program, device: int) -> list[int]:
    """Bytes on a device before the first step, and during and after each, with every storage as a set of values."""
    size = {name: held_bytes(t, device) for name, t in program.types.items()}
    everywhere = {name: [held_bytes(t, d) for d in program.devices] for name, t in program.types.items()}
    stores = [({name}, size[name]) for name, _ in program.inputs]

    def total() -> int:
        return sum(n for _, n in stores)

    def later(number: int) -> set[str]:
        return {o for s in program.steps[number:] for o in s.operands} | set(program.outputs)

    def sweep(number: int) -> None:
        for values, _ in stores:
            values &= later(number)
        stores[:] = [(values, n) for values, n in stores if values]

    found = [total()]
    sweep(0)
    for number, step in enumerate(program.steps):
        pairs = PAIRS.get(step.op.name, [(0, k) for k in range(len(step.operands))])
        for r, o in [] if step.op.name == "einsum" else pairs:
            result, operand = step.results[r], step.operands[o]
            values, _ = next(store for store in stores if operand in store[0])
            alone = values == {operand} and operand not in later(number + 1) and step.operands.count(operand) == 1
            if step.op.name == "send":
                fits = operand not in later(number + 1) and result in later(number + 1)
            else:
                fits = (alone or step.op.name == "reshape") and everywhere[result] == everywhere[operand]
            if fits and not any(result in store[0] for store in stores):
                values.add(result)
        stores += [({r}, size[r]) for r in step.results if not any(r in values for values, _ in stores)]
        found.append(total())
        sweep(number + 1)
        found.append(total())
    return found


@settings(max_examples=150, deadline=None)
@given(some.sharing())
def test_what_shares_storage_counts_once(program: Program) -> None:
    books, all_held = account(program), [held(program, d) for d in program.devices]
    most = [max(each) for each in zip(*all_held, strict=True)]
    assert books.input_bytes == most[0] and books.peak_bytes == max(most[::2])
    staged = [s.op.staging(*program.step_types(s)[0]) for s in program.steps]
    assert list(books.step_workspaces) == [n + k for n, k in zip(most[1::2], staged, strict=True)]


def test_an_update_takes_the_place_of_what_nobody_reads_again() -> None:
    t = sp.TensorType("f32", (8,), ("x",), sp.Mesh(x=2))
    given = {"w": t, "g": t}

    def held(steps: list[Step], *outputs: str) -> list[int]:
        return [n // 16 for n in account(Program(given, steps, outputs)).step_workspaces]

    once = [Step(Sgd(0.5), ("w", "g"), ("new",))]
    assert held(once, "new") == [2]
    assert held(once, "new", "w") == [3]  # kept
    assert held([Step(Sgd(0.5), ("w", "w"), ("new",))], "new") == [2]  # read while it is written
    assert held([*once, Step(Elementwise("a+b"), ("w", "new"), ("sum",))], "sum") == [3, 2]
    seen = [Step(Reshape("a -> a b=1"), ("w",), ("view",)), *once]
    assert held(seen, "new") == [2, 2]  # the view is never read
    assert held(seen, "new", "view") == [2, 3]  # it would see the update
    assert held([*seen[:1], Step(Elementwise("-a"), ("view",), ("b",))], "b", "w", "g") == [2, 3]
    assert held([*seen[:1], Step(Elementwise("-a"), ("view",), ("b",))], "b", "g") == [2, 2]
    sums = [Step(Elementwise("a+b"), ("w", "g"), ("1",)), Step(Einsum("a->a"), ("1",), ("2",))]
    assert held(sums, "2") == [2, 2]
    assert held([Step(Elementwise("a+b"), ("w", "g"), ("1",))], "1", "w") == [2]  # the other operand's
    assert held([Step(Elementwise("a+b"), ("w", "g"), ("1",))], "1", "w", "g") == [3]
