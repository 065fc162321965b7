"""Programs on JAX: every op, random programs, compiled collectives and bytes, errors, records; and rounds of permutes.

What needs eight devices runs once, in a child process (`jax_checks.py`).
"""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
from benchmarks import suites
from compute_examples import EXAMPLES, UNEQUAL
from execution.jax_child import checks_read, said, said_to_tests
from gradient_examples import GRADIENTS
from shardplan.core.dtypes import COMBINE, identity, numpy_dtype
from shardplan.core.messages import at_root, messages
from shardplan.core.ops import OPS, Exchange, Permute, Send
from shardplan.core.ops.collective import Collective
from shardplan.core.reference import distribute
from shardplan.core.tensor import TensorType
from shardplan.execution.jax.lower import moved_bytes
from shardplan.execution.rounds import PermuteRound, PermuteRounds, colour, permute_rounds
from strategies import applied, cross_pairs, pairs

pytest.importorskip("jax")


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    return said_to_tests(request, "execution/jax_checks.py")


def test_every_check_is_read() -> None:
    source = (Path(__file__).parent / "jax_checks.py").read_text()
    listed = set(re.findall(r"\w+", source.partition("CHECKS: tuple[Callable[[], Any], ...] = (")[2].partition(")")[0]))
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    assert checks_read(tests) == listed


def test_every_op_alone(seen: dict[str, Any]) -> None:
    assert seen["every_op"]["differences"] == {}
    law = {next(e.assigned(UNEQUAL))[0].name for e in (*GRADIENTS, *EXAMPLES)}  # on JAX by `test_compute_law.py`
    known = law | {*seen["every_op"]["names"], "backward", "sgd", "adamw", "adafactor"}
    # Rings run on JAX in jobs (`test_jobs.py`); opaque runs nowhere.
    assert known == set(OPS) - {"opaque", "ring_attention", "ring_attention_backward"}


def test_bytes_of_every_op(seen: dict[str, Any]) -> None:
    """Compiled, an op moves what `moved_bytes` says; more than the op only where XLA has no such collective."""
    assert seen["bytes_of_ops"]["wrong"] == []
    assert set(seen["bytes_of_ops"]["more"]) <= {"exchange", "send", "all_reduce", "reduce", "broadcast"}


def test_every_reduction(seen: dict[str, Any]) -> None:
    """Sum, max, min, product, band, bor and bxor, scattered, for all and to a root, whole and in chunks."""
    assert seen["reductions"] == []


def test_random_programs(seen: dict[str, Any]) -> None:
    assert seen["sample"] == []


def test_bodies(seen: dict[str, Any]) -> None:
    """Repeats and swaps equal the reference; a swap is recorded as its two halves, each with its own bytes."""
    assert seen["bodies"]["differences"] == []
    assert seen["bodies"]["refused"] == (
        "BackendError: jax: step 0 (repeat): its body sends between meshes; legal is a body on one, which JAX compiles "
        "as a whole"
    )
    assert {s[0] for s in seen["bodies"]["spans"]} == {0} and len(seen["bodies"]["spans"]) == 8


def test_without_native_collectives(seen: dict[str, Any]) -> None:
    """With an empty table every op, and random programs, run as their lowerings, and move what these say."""
    assert seen["interpreted"] == {"every_op": {}, "bytes": [], "sample": []}


def test_ops_from_outside(seen: dict[str, Any]) -> None:
    """An op that says its typing and its lowering does what these say, and moves what it counts."""
    assert seen["outside"] == {"gather": [0, 1, 2, 3], "backwards": [3, 2, 1, 0], "wrong": []}


def test_every_dtype(seen: dict[str, Any]) -> None:
    assert seen["every_dtype"] == {}


def test_every_bit(seen: dict[str, Any]) -> None:
    assert seen["exact_bits"] == []


def test_compiled_plans(seen: dict[str, Any]) -> None:
    """The HLO has the collectives and the bytes of the program, and no array over the bound."""
    found = seen["hlo"]
    assert found.get("wrong") == [], found
    assert found["checked"] == 28
    assert all(temporary >= 0 and workspace > 0 for temporary, workspace in found["memory"])


def test_chunks_stay_apart(seen: dict[str, Any]) -> None:
    found = seen["chunks"]
    assert found["1"] == [1, 1440, [1920]]
    assert found["3"] == [3, 1440, [640]]
    assert found["4"] == [4, 1440, [480]]
    assert found["packed"] == [12, 12, 44, 44]  # two parts of six i32, two of 16 + 6 f32
    assert found["barriers"] == 3
    assert found["permute"] == [["collective-permute", 8, 8]] * 4


ERRORS = {
    "uneven": "BackendError: jax: %0 has the type i32[7@a] on a=2, b=2, c=2, which is unevenly tiled; JAX gives every "
    "device a shard of one size: legal are dims that the product of their axes divides",
    "boxes": "BackendError: jax: %1 has the type i32[7]{boxes#d9a564cf} on a=2, b=2, c=2, which lies in a table of "
    "boxes; JAX gives every device a shard of one size: legal are dims that the product of their axes divides",
    "complex": "BackendError: jax: step 0 (all_reduce): max is not defined for c64; legal is a real dtype",
    "unknown": "BackendError: jax: step 0 (unknown): it has no lowering to JAX",
    "device": "BackendError: jax: the program is on device 8, but jax.devices() has the ids 0, 1, 2, 3, 4, 5, 6, 7",
    "inputs": "LayoutError: 0 inputs given, but the program has 1",
    "count": "LayoutError: input %x0: 3 shards for the 8 devices of f32[8@a, 4] in this process",
    "shape": "LayoutError: input %x0, device 7: a shard of dtype float32 and shape (2, 4), but f32[8@a, 4] needs f32 "
    "and (4, 4)",
    "dtype": "LayoutError: input %x0, device 0: a shard of dtype int32 and shape (4, 4), but f32[8@a, 4] needs f32 and "
    "(4, 4)",
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(seen: dict[str, Any], name: str) -> None:
    assert seen["errors"][name] == ERRORS[name]


def test_records(seen: dict[str, Any]) -> None:
    found = seen["records"]
    assert found["equal"] and found["times"]
    gathered, sent, last = ([[0, d, 32] for d in range(8)], [[1, d, 0] for d in range(8)],
                            [[2, d, 96] for d in range(4, 8)])  # fmt: skip
    assert found["spans"] == gathered + sent + last
    assert found["on"] == [4, 5, 6, 7]


def test_programs_are_kept_and_results_go_in_again(seen: dict[str, Any]) -> None:
    assert seen["kept"] == [True] * 4


def test_donated_shards_go_when_no_step_needs_them(seen: dict[str, Any]) -> None:
    assert seen["donated"] == []


def test_two_processes() -> None:
    """Two processes of four devices: one program runs; two programs, one that raises and one that is late are told.

    So are programs that both know and run in two orders, alone and as moves; the processes then go on.
    """
    found = said("execution/jax_launch.py")
    assert found["equal"] == [True, True]
    for me, text in enumerate(found["other"]):
        assert text.startswith(f"BackendError: jax: process {me} runs a program of 1 steps (hash "), text
        assert text.endswith("); nothing was sent") and f"but another is run by process {1 - me} (" in text
    raised = "LayoutError: shards is 5; legal is a list of arrays; for several inputs of such lists"
    told = f"BackendError: jax: a program of 2 steps did not start: process 0 raised {raised}; nothing was sent"
    assert found["shards"] == [raised, told]
    raised, told = found["limit"]
    assert raised.startswith("Infeasible: ")
    assert told == f"BackendError: jax: a program of 1 steps did not start: process 0 raised {raised}; nothing was sent"
    late = "TimedOut: jax: process 0 came to run 9, a program of 1 steps, but after 0.5 s these had not: 1"
    assert found["late"] == late
    digest = "[0-9a-f]{16}"
    other = (
        rf"BackendError: jax: this process runs the program {digest} \([a-z_ ]+\), another process {digest}"
        rf"( or {digest})?; nothing was moved: all must run their programs in one order"
    )
    for first, mixed, again in (*found["order"], *found["moves"]):
        assert set(first) == set(again) == {True}, "agreed upon, and after an error"
        assert all(re.fullmatch(other, str(text)) for text in mixed), mixed


# Rounds, without JAX.


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=60, unique=True))
def test_colours_are_apart_and_few(edges: list[tuple[int, int]]) -> None:
    colours = colour(edges)
    for end in (0, 1):
        assert len({(e[end], c) for e, c in zip(edges, colours, strict=True)}) == len(edges)
    most = max((sum(e[k] == v for e in edges) for k in (0, 1) for v in range(10)), default=0)
    assert len(set(colours)) == most


def played(op: Collective, operands: list[list[np.ndarray]], types: list[TensorType]) -> list[list[np.ndarray]]:
    """The rounds run in numpy, piece by piece; no device sends or gets two in a round, and no two land in one place."""
    plan = permute_rounds(op, tuple(types))
    here = {d: k for k, d in enumerate(plan.devices)}
    held = {n: [np.zeros(shape, numpy_dtype(plan.dtypes[n])) for _ in here] for n, shape in plan.shapes.items()}
    landed = {n: [np.zeros(shape, dtype=bool) for _ in here] for n, shape in plan.shapes.items()}
    for k, (t, shards) in enumerate(zip(types, operands, strict=True)):
        for d, x in zip(t.mesh.devices, shards, strict=True):
            held[f"x{k}"][here[d]] = x
    for one in itertools.chain(*plan.batches):
        for end in (0, 1):
            assert len({pair[end] for pair in one.pairs}) == len(one.pairs)
        for sender, receiver in one.pairs:
            size = tuple(one.extent[receiver])
            assert all(n <= most for n, most in zip(size, one.into, strict=True))
            old, seen = (part(x[one.target][receiver], one.at[receiver], size) for x in (held, landed))
            if one.source is None:
                old[...] = identity(one.fold or "sum", old.dtype)
                continue
            cut = size if one.shape == one.into else one.shape
            new = part(held[one.source][sender], one.start[sender], cut).reshape(old.shape)
            old[...] = COMBINE[one.fold](old, new) if one.fold else new
            if one.travels:
                assert not seen.any()
                seen[...] = True
    return [[held[f"y{k}"][here[d]] for d in u.mesh.devices] for k, u in enumerate(op.infer(*types))]


def part(array: np.ndarray, start: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    seen = array if array.ndim == len(size) else array.reshape(-1)
    return seen[(..., *(slice(a, a + n) for a, n in zip(start, size, strict=True)))]


def moves(plan: PermuteRounds) -> list[PermuteRound]:
    return [one for one in itertools.chain(*plan.batches) if one.travels]


@settings(max_examples=150)
@given(st.one_of(pairs(("even", "rooted"), 16), cross_pairs(12, marked=False)), st.integers(1, 4))
def test_rounds_deliver_every_box_once(both: tuple[TensorType, TensorType], chunks: int) -> None:
    s, t = both
    if s.layout.partial or t.layout.partial or t.layout.root or not (s.all_even and t.all_even):
        return
    op = Send(t.layout, t.mesh, chunks)
    array = np.arange(np.prod(s.shape), dtype=np.int32).reshape(s.shape)
    (got,) = played(op, [distribute(array, s)], [s])
    assert np.array_equal(sp.collect(got, t), array)
    senders, receivers, _ = messages(s, t)
    degree = max((int(np.bincount(x).max()) for x in (senders, receivers) if len(x)), default=0)
    if chunks == 1:
        assert len(moves(permute_rounds(op, (s,)))) == degree


@given(applied(("even", "partial", "rooted")), st.integers(1, 3))
def test_rounds_do_what_an_op_means(one: tuple[Collective, TensorType], chunks: int) -> None:
    op, t = one[0].in_chunks(chunks), one[1]
    if not (t.all_even and op.result(t).all_even):
        return
    shards = distribute(np.arange(np.prod(t.shape)).reshape(t.shape).astype(numpy_dtype(t.dtype)), t)
    (got,), (expected,) = played(op, [shards], [t]), op.reference([shards], [t])
    for x, y, here in zip(got, expected, at_root(op.result(t)), strict=True):
        assert not here or np.array_equal(x, y), (op, str(t))


def test_padding_is_counted() -> None:
    """Over 2 x 3 devices two receive a tile of 4 rows and two lack half of theirs: all are sent 4 rows in one round."""
    mesh = sp.Mesh(a=2, b=3)
    s, t = (TensorType.parse(x, mesh) for x in ("i32[12@a, 5]", "i32[12@b, 5]"))
    plan = permute_rounds(Exchange(t.layout), (s,))
    assert [(one.shape, len(one.pairs), one.is_unpadded) for one in moves(plan)] == [((4, 5), 4, False)]
    assert (
        plan.padded_received_bytes() == {0: 0, 1: 80, 2: 80, 3: 80, 4: 80, 5: 0} == moved_bytes(Exchange(t.layout), s)
    )
    assert Exchange(t.layout).received_bytes(s).tolist() == [0, 40, 80, 80, 40, 0]
    four, three = sp.Mesh({"p": 4}, devices=[0, 1, 2, 3]), sp.Mesh({"q": 3}, devices=[4, 5, 6])
    t = TensorType("i32", (12,), ("q",), three)
    plan = permute_rounds(Send(t.layout, three), (TensorType("i32", (12,), ("p",), four),))
    assert [one.shape for one in moves(plan)] == [(3,), (3,)]  # 3, 2 and 1 rows each: no two rounds have less padding


def test_shapes_go_apart_where_that_costs_no_round() -> None:
    """Pieces of 2 and of 1 in two rounds either way: in rounds of their own nothing is padded."""
    other = sp.Mesh({"p": 2, "q": 2}, devices=range(2, 6))
    t = TensorType("i32", (6,), ("q",), other)
    plan = permute_rounds(Send(t.layout, other), (TensorType("i32", (6,), ("a",), sp.Mesh(a=3, b=2)),))
    assert [(one.shape, one.is_unpadded) for one in moves(plan)] == [((2,), True), ((1,), True)]


def test_a_device_that_keeps_its_tile_sends_it_to_itself() -> None:
    """Of four tiles two stay: one permute of all, after which nothing has to be put together."""
    mesh = sp.Mesh(a=2, b=2)
    s, t = (TensorType.parse(x, mesh) for x in ("i32[8@(a,b), 3]", "i32[8@(b,a), 3]"))
    for op in (Permute(t.layout), Exchange(t.layout)):
        ((one,),) = permute_rounds(op, (s,)).batches
        assert sorted(one.pairs) == [(0, 0), (1, 2), (2, 1), (3, 3)] and one.is_unpadded
        assert moved_bytes(op, s) == {0: 0, 1: 24, 2: 24, 3: 0}


def test_moved_bytes_are_those_of_the_program_without_an_exchange() -> None:
    for s, t, _ in suites.problems("U", 11, 40, most_devices=16):
        assert isinstance(s, TensorType) and isinstance(t, TensorType)
        program = sp.redistribute(s, t).program
        for step in program.steps:
            operands, _ = program.step_types(step)
            got = np.array([moved_bytes(step.op, *operands)[d] for d in s.mesh.devices])
            assert np.all(got >= step.op.received_bytes(*operands))
            if not isinstance(step.op, Exchange):
                assert np.array_equal(got, step.op.received_bytes(*operands))
