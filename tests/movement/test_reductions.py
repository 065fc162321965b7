"""Reduction programs: the language, the checker, the graph, the types, and what must agree between them."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instruction_oracle import POISON, begin, count_programs, hierarchy, is_sum, run_instructions, step_sets

import shardplan as sp
from shardplan.core.messages import at_root
from shardplan.errors import CertificateError, Infeasible, LayoutError, TopologyError, TypingError
from shardplan.hardware.level_factors import factors
from shardplan.movement.reductions import state_matrix
from shardplan.movement.reductions.instructions import Grouping, Instruction, alphabet, groupings
from shardplan.movement.reductions.payload import payload
from shardplan.movement.reductions.reduce import check_path
from shardplan.movement.reductions.state_graph import explore, state_graph
from shardplan.movement.reductions.type_graph import (
    edge_costs,
    instruction_lines,
    path_of,
    reduction_space,
)

RATES = st.sampled_from([1e9, 8e9, 2.5e10, 1e11, 3e11])


def switches(*levels, latency=0.0):
    """A topology of switches from (size, bandwidth), outermost first."""
    return sp.Topology("t", tuple(_level(f"l{j}", n, b, latency) for j, (n, b) in enumerate(levels)))


def _level(name, size, bandwidth, latency):
    from shardplan.hardware.level import Level

    return Level(name, size, "switch", bandwidth, latency)


@st.composite
def systems(draw, depth=3, latency=0.0):
    """A placement of one axis, or of two with the second on one device a level, over levels of random rates."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=depth))
    topology = switches(*((n, draw(RATES)) for n in sizes), latency=latency)
    return next(sp.placements(sp.Mesh(a=math.prod(sizes)), topology))


# The language.


def test_groupings_are_depth_squared_disjoint_and_of_one_size():
    for sizes in [(4,), (2, 3), (2, 2, 2), (3, 2, 2), (2, 3, 2, 2)]:
        depth, count = len(sizes), math.prod(sizes)
        seen = set()
        for grouping in groupings(depth):
            groups = grouping.members(sizes)
            flat = groups.reshape(-1).tolist()
            assert len(set(flat)) == len(flat)
            assert groups.shape[1] == math.prod(sizes[d] for d in grouping.varies)
            later = math.prod(sizes[grouping.varies[-1] + 1 :])
            if grouping.master:
                assert all(m % later == 0 for m in flat)
                assert len(flat) == count // later
            else:
                assert sorted(flat) == list(range(count))
            seen.add((groups.shape, groups.tobytes()))
        assert len(seen) == depth**2


def test_the_paper_form_tells_instructions_apart():
    names = ("pod", "node", "gpu")
    forms = {step.form(3, names) for step in alphabet(3)}
    assert len(forms) == len(alphabet(3)) == 45
    assert {
        "(pod, InsideGroup, AllGather)",
        "(node, Parallel(root), Reduce)",
        "(node, Parallel(pod), AllReduce)",
    } < forms
    assert "(gpu, Master(pod), ReduceScatter)" not in forms  # no digit is inside it
    assert "(node, Master(pod), ReduceScatter)" in forms


# The checker.


def after(sizes, *program):
    """The states after a program, [1, members, rows]; none where a step is refused."""
    states, _ = state_matrix.ends(sizes)
    for step in program:
        states = state_matrix.step(step, sizes, states, state_matrix.rows_held(states))[1]
    return states


def refusal(sizes, *program):
    """The preconditions that the last step of a program breaks, of rows and addends."""
    states, step = after(sizes, *program[:-1]), program[-1]
    groups = step.grouping.members(sizes)
    part = states[:, groups]
    union = part[:, :, 0] if step.collective == "broadcast" else np.bitwise_or.reduce(part, axis=2)
    rules = state_matrix._on_rows(step.collective, state_matrix.rows_held(states)[:, groups])
    rules = rules | state_matrix._on_addends(step.collective, part, union)
    assert not len(after(sizes, *program))
    return {reason for reason, holds in rules.items() if not holds.all()}


def test_hoare_triples():
    inside, across, every = Grouping((1,)), Grouping((0,)), Grouping((0, 1))

    def refused(*steps):
        return refusal((2, 2), *(Instruction(*step) for step in steps))

    assert refused((inside, "all_reduce"), (inside, "all_reduce")) == {"an addend would be counted twice"}
    assert refused((inside, "all_gather")) == {"the row sets overlap"}
    assert refused((inside, "reduce_scatter"), (inside, "all_reduce")) >= {"the row sets are empty or differ"}
    assert refused((inside, "broadcast")) == {"a member holds what the first does not"}
    assert refused((inside, "all_reduce"), (inside, "broadcast")) == {"all hold the same already"}
    assert "the first member holds nothing" in refused((every, "reduce"), (inside, "broadcast"))
    assert refusal((2, 3), Instruction(across, "reduce_scatter"), Instruction(across, "reduce_scatter")) >= {
        "the row sets are empty or differ",
        "the rows are not cut by the members",
    }
    for step in alphabet(2):  # the goal is not left
        assert not len(after((2, 2), Instruction(every, "all_reduce"), step))


def test_an_end_is_checked():
    inside, every = Grouping((1,)), Grouping((0, 1))
    state_matrix.check((2, 2), [Instruction(every, "all_reduce")], "UU")
    state_matrix.check((2, 2), [Instruction(every, "reduce_scatter")], "SS")
    state_matrix.check((2, 2), [Instruction(every, "reduce")], "RR")
    state_matrix.check((8, 4, 4, 4), [Instruction(Grouping((0, 1, 2, 3)), "all_reduce")], "UUUU")
    for program, end in (
        ([Instruction(inside, "all_reduce")], "UU"),
        ([Instruction(every, "all_reduce")], "SS"),
        ([Instruction(every, "reduce")], "UR"),
        ([Instruction(every, "reduce_scatter")], "US"),
        ([], "UU"),
    ):
        with pytest.raises(TypingError, match="the end is not"):
            state_matrix.check((2, 2), program, end)
    with pytest.raises(TypingError, match=r"step 1: \(0, InsideGroup, AllReduce\) is refused"):
        state_matrix.check((2, 2), [Instruction(inside, "all_reduce")] * 2, "UU")


def test_many_members_are_checked_on_a_few():
    assert state_matrix.checked_sizes((4, 16)) == (4, 16)
    assert state_matrix.checked_sizes((32, 16)) == (3, 3)
    assert state_matrix.checked_sizes((8, 2, 8)) == (3, 2, 3)
    assert state_matrix.checked_sizes((4, 4, 4, 4)) == (2, 3, 3, 3)
    assert state_matrix.checked_sizes((4,) * 6) == (2,) * 6
    odd = [Instruction(Grouping((0,)), "reduce_scatter"), Instruction(Grouping((0, 1)), "all_reduce")]
    with pytest.raises(TypingError, match="step 1"):
        state_matrix.check((32, 16), odd, "UU")


@given(st.sampled_from([(2,), (3,), (2, 2), (3, 2), (2, 3), (2, 2, 2), (3, 1, 2)]), st.data())
@settings(max_examples=200, deadline=None)
def test_a_step_is_what_sets_say(sizes, data):
    count, ours = math.prod(sizes), state_matrix.ends(sizes)[0]
    sets = begin(count)
    for _ in range(6):
        found = {step: step_sets(sets, sizes, step) for step in alphabet(len(sizes))}
        for step, then in found.items():
            at, states = state_matrix.step(step, sizes, ours, state_matrix.rows_held(ours))
            assert len(at) == (then is not None), step
            if then is not None:
                table = [[sum(1 << d for d in held.get(row, ())) for row in range(count)] for held in then]
                assert states[0].tolist() == table, step
        legal = [step for step, then in found.items() if then is not None]
        if not legal:
            return
        step = data.draw(st.sampled_from(legal))
        sets, ours = found[step], state_matrix.step(step, sizes, ours, state_matrix.rows_held(ours))[1]


def apart(sizes):
    """All programs up to 4 instructions by blind search on sets."""
    found = []

    def follow(state, path):
        for step in alphabet(len(sizes)):
            then = step_sets(state, sizes, step)
            if then is None:
                continue
            if is_sum(then):
                found.append((*path, step))
            elif len(path) < 3:
                follow(then, (*path, step))

    follow(begin(math.prod(sizes)), ())
    return found


@pytest.mark.parametrize(("sizes", "count"), [((2,), 3), ((2, 2), 71), ((2, 3), 71), ((3, 2), 71)])
def test_the_graph_is_what_blind_search_finds(sizes, count):
    graph = state_graph(len(sizes))
    ours = set(map(graph.instructions, graph.programs(4)))
    blind = apart(sizes)
    assert len(blind) == len(ours) == count
    assert set(blind) == ours


def test_pinned_counts():
    assert [explore((2,) * n).count for n in (1, 2, 3, 4)] == [4, 40, 722, 20_285]
    assert [state_graph(n).states for n in (1, 2, 3, 4)] == [4, 25, 236, 3_571]
    counted = {n: [sum(1 for _ in state_graph(n).programs(limit)) for limit in (3, 4, 5, 6, 7)] for n in (1, 2, 3)}
    assert counted == {1: [3] * 5, 2: [29, 71, 93, 93, 93], 3: [66, 385, 1635, 4576, 8749]}
    for sizes in ((2, 2), (2, 5), (7, 2), (4, 4), (16, 4)):
        found = explore(sizes)
        assert (found.count, int(found.live().sum())) == (40, 25)
        assert [count_programs(found, limit) for limit in (3, 4, 5, 6)] == [29, 71, 93, 93]
    # Over unequal sizes some states of three digits differ, and at seven instructions two programs fall away.
    unequal = explore((3, 2, 2))
    assert unequal.count == 747
    assert [count_programs(unequal, limit) for limit in (3, 4, 5, 6, 7)] == [66, 385, 1635, 4576, 8747]
    for n, reachable in enumerate((4, 16, 61, 223), 1):
        space = reduction_space(n)
        assert np.isfinite(space.distances("P" * n, np.ones(len(space.source)))).sum() == reachable


@pytest.mark.parametrize("sizes", [(3, 2, 2), (2, 3, 2), (2, 2, 3), (4, 2, 2), (2, 4, 4), (2, 2, 8)])
def test_programs_are_checked_at_the_true_sizes(sizes):
    placement = next(sp.placements(sp.Mesh(a=math.prod(sizes)), switches(*((n, 1e9) for n in sizes))))
    assert len(sp.reductions(placement, "a", 1e6)) == 1635
    seven = {(3, 2, 2): 8747, (2, 3, 2): 8749, (2, 2, 3): 8747}.get(sizes)
    if seven is not None:
        assert len(sp.reductions(placement, "a", 1e6, limit=7)) == seven


def test_five_instructions_miss_the_best_of_four_levels():
    placement = next(sp.placements(sp.Mesh(a=16), switches((2, 1e9), (2, 1e10), (2, 1e11), (2, 1e12))))
    five = sp.reductions(placement, "a", 2**30, limit=5, algorithm="ring")[0]
    best = sp.reductions(placement, "a", 2**30, limit=None, algorithm="ring", top=3)
    names = [step.collective for step in best[0].instructions]
    assert names == ["reduce_scatter"] * 3 + ["all_reduce"] + ["all_gather"] * 3
    assert best[0].seconds < five.seconds
    assert sp.reduce(placement, "a", 2**30, algorithm="ring").seconds == pytest.approx(best[0].seconds, rel=1e-9)
    assert best[0].seconds <= best[1].seconds <= best[2].seconds


def test_synthesis_hierarchies():
    topology = switches((1, 1e9), (2, 1e9), (2, 1e9), (4, 1e9))
    matrix = ((1, 1, 2, 2), (1, 2, 1, 2))
    placement = sp.Placement(sp.Mesh(a=4, b=4), topology, matrix)
    counts = [
        count_programs(explore(*hierarchy(placement, "b", kind)), 5) for kind in ("system", "column", "row", "factors")
    ]
    assert counts == [0, 26, 93, 93]


# Soundness.


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (3, 2), (2, 2, 2)])
def test_every_program_gives_the_exact_sums(sizes):
    graph = state_graph(len(sizes))
    count = math.prod(sizes)
    addends = np.random.default_rng(0).integers(-1000, 1000, (count, count))
    done = 0
    for path in graph.programs(5):
        values, rows = run_instructions(sizes, graph.instructions(path), addends)
        assert all(len(r) == count for r in rows)
        assert (values == addends.sum(axis=0)).all()
        done += 1
    assert done == {2: 93, 3: 1635}[len(sizes)]


def test_a_wrong_program_gives_wrong_sums():
    twice = [Instruction(Grouping((1,)), "all_reduce")] * 2
    assert (run_instructions((1, 2), twice, np.array([[1, 2], [3, 4]]))[0] != [[4, 6], [4, 6]]).any()
    rooted = [Instruction(Grouping((1,)), "reduce")]
    assert (run_instructions((1, 2), rooted, np.array([[1, 2], [3, 4]]))[0][1] == POISON).all()


PRECONDITIONS = (
    "an addend would be counted twice",
    "the row sets are empty or differ",
    "the row sets overlap",
    "the row sets are empty or of different size",
    "the first member holds nothing",
    "a member holds what the first does not",
)


@pytest.mark.filterwarnings("ignore:divide by zero")  # of what is refused else
@pytest.mark.parametrize("reason", PRECONDITIONS)
def test_each_precondition_refuses_a_wrong_program(reason, monkeypatch):
    """Without it a program passes that gives wrong sums, or none: it is not vacuous."""
    for name in ("_on_rows", "_on_addends"):
        honest = getattr(state_matrix, name)

        def without(*args, honest=honest):
            return {said: holds for said, holds in honest(*args).items() if said != reason}

        monkeypatch.setattr(state_matrix, name, without)
    sizes, wrong = (2, 2), 0
    begins, goal = state_matrix.ends(sizes)
    addends = np.random.default_rng(1).integers(1, 10**6, (4, 4))

    def follow(state, path):
        nonlocal wrong
        for step in alphabet(2):
            _, then = state_matrix.step(step, sizes, state, state_matrix.rows_held(state))
            if not len(then):
                continue
            longer = (*path, step)
            if np.array_equal(then, goal) or len(longer) == 3:
                try:
                    values, rows = run_instructions(sizes, longer, addends)
                    good = all(len(r) == 4 for r in rows) and bool((values == addends.sum(axis=0)).all())
                except ValueError:
                    good = False
                claimed = bool((then != 0).all())
                wrong += claimed and not good
            else:
                follow(then, longer)

    follow(begins, ())
    assert wrong > 0


# Types and instructions.


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_types_is_a_valid_program_and_which_do_not(depth):
    graph = state_graph(depth)
    untyped = {}
    for limit in (4, 5):
        programs = map(graph.instructions, graph.programs(limit))
        untyped[limit] = sum(path_of(program, "P" * depth) is None for program in programs)
    assert untyped == {1: {4: 0, 5: 0}, 2: {4: 0, 5: 0}, 3: {4: 7, 5: 102}}[depth]


def test_types_admit_old_values_that_the_checker_refuses():
    """All 93 programs of two factors type; 8 more sequences type in which stale data would be read."""
    space = reduction_space(2)
    typed, refused = 0, 0

    def follow(state, path):
        nonlocal typed, refused
        for edge in map(space.edge, range(len(space.source))):
            if edge.source != state or len(path) == 5:
                continue
            longer = (*path, edge.instruction)
            if edge.target != "UU":
                follow(edge.target, longer)
                continue
            typed += 1
            try:
                state_matrix.check((2, 2), longer, "UU")
            except TypingError:
                refused += 1

    follow("PP", ())
    assert (typed - refused, refused) == (93, 8)


@given(systems(), st.sampled_from(["ring", "tree", "auto"]), st.floats(1e3, 1e9))
@settings(max_examples=60, deadline=None)
def test_typed_best_equals_state_graph_best(placement, algorithm, nbytes):
    every = sp.reductions(placement, "a", nbytes, limit=None, top=1, algorithm=algorithm)
    plan = sp.reduce(placement, "a", nbytes, algorithm=algorithm)
    assert plan.seconds == pytest.approx(every[0].seconds, rel=1e-9)
    few = sp.reductions(placement, "a", nbytes, limit=4, algorithm=algorithm)
    assert plan.seconds <= few[0].seconds * (1 + 1e-9)
    assert [r.seconds for r in few] == pytest.approx(sorted(r.seconds for r in few), rel=1e-9)
    plan.certificate.check()
    assert plan.certificate.lower_bound_seconds <= plan.seconds * (1 + 1e-9)
    loose = sp.reduce(placement, "a", nbytes, algorithm=algorithm, subsets=True)
    assert loose.seconds <= plan.seconds * (1 + 1e-9)
    assert loose.certificate.lower_bound_seconds <= loose.seconds * (1 + 1e-9)


@given(systems(depth=2, latency=2e-6), st.data())
@settings(max_examples=25, deadline=None)
def test_typed_programs_run_and_their_prices_are_the_enumeration_s(placement, data):
    every = sp.reductions(placement, "a", data.draw(st.integers(1, 5000)))
    for one in data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=3)):
        assert one.program is not None
        assert one.certificate is not None
        one.certificate.check()
        assert one.certificate.seconds == pytest.approx(one.seconds, rel=1e-9)
        source, target = one.program.input_types[0], one.program.output_types[0]
        shards = [
            np.random.default_rng(k).integers(-99, 99, source.local_shape(k)).astype(np.float32)
            for k in range(source.mesh.size)
        ]
        out = sp.run(one.program, shards)
        assert all(np.array_equal(x, sum(shards)) for x in out)
        assert target.layout.partial == target.layout.root == ()


def test_every_enumerated_program_costs_what_its_types_say_and_is_not_called_exact():
    placement = next(sp.placements(sp.Mesh(a=8), switches((2, 1e9), (4, 1e10), latency=2e-6)))
    every = sp.reductions(placement, "a", 2**20)
    assert len(every) == 93
    for one in every:
        assert one.certificate is not None
        assert one.certificate.seconds == pytest.approx(one.seconds, rel=1e-9)
        assert one.certificate.status == "heuristic"


def test_of_equal_costs_the_shorter_programs_come_first():
    graph = state_graph(2)
    lengths = [len(path) for path in graph.best([0.0] * len(graph.edges), 93)]
    assert lengths == sorted(len(path) for path in graph.programs(5))


@given(systems(depth=3), st.sampled_from(["replicated", "sharded", "root"]))
@settings(max_examples=30, deadline=None)
def test_other_targets(placement, target):
    plan = sp.reduce(placement, "a", 1000, target=target)
    plan.certificate.check()
    source, wanted = plan.program.input_types[0], plan.program.output_types[0]
    shards = [np.full(source.local_shape(k), k + 1, dtype=np.float32) for k in range(source.mesh.size)]
    out = sp.run(plan.program, shards)
    n = placement.mesh.size
    assert (out[0] == n * (n + 1) / 2).all()
    assert wanted.local_bytes() * (n if target == "sharded" else 1) == source.local_bytes()
    assert bool(wanted.layout.root) == (target == "root" and n > 1)
    assert "send" not in {step.op.name for step in plan.program.steps}  # payloads have a dim for every factor
    whole = sp.reduce(placement, "a", 1000)
    assert plan.seconds <= whole.seconds * (1 + 1e-9)


@given(systems(depth=3, latency=1e-6), st.sampled_from(["f32"]), st.integers(1, 10**7))
@settings(max_examples=30, deadline=None)
def test_reduce_is_redistribute(placement, dtype, nbytes):
    plan = sp.reduce(placement, ("a",), nbytes)
    source, target = plan.program.input_types[0], plan.program.output_types[0]
    assert source.shape[:-1] == tuple(f.size for f in factors(placement, "a"))
    assert nbytes <= source.local_bytes() < nbytes + 4 * math.prod(source.shape[:-1])
    again = sp.redistribute(source, target, topology=placement)
    assert str(again.program) == str(plan.program)
    assert again.seconds == plan.seconds


def test_several_axes_and_interleaved_digits():
    topology = switches((2, 1e9), (8, 1e11))
    mesh = sp.Mesh(data=4, tensor=2, pipe=2)
    for placement in sp.placements(mesh, topology):
        for count in (1, 2, 3):
            for axes in itertools.combinations(mesh.axes, count):
                plan = sp.reduce(placement, axes, 2**20, algorithm="ring")
                every = sp.reductions(placement, axes, 2**20, algorithm="ring")
                assert plan.seconds == pytest.approx(every[0].seconds, rel=1e-9)
                uncollapsed = sp.reduce(placement, axes, 2**20, algorithm="ring", uncollapsed=True)
                assert uncollapsed.seconds <= plan.seconds * (1 + 1e-9)
                source = plan.program.input_types[0]
                shards = [np.full(source.local_shape(k), 3**k, dtype=np.float32) for k in range(16)]
                small = sp.reduce(placement, axes, 64)
                inputs = [x.reshape(-1)[: math.prod(small.program.input_types[0].local_shape())] for x in shards]
                inputs = [x.reshape(small.program.input_types[0].local_shape()) for x in inputs]
                out = sp.run(small.program, inputs)
                groups = mesh.group_places(axes)
                for group in groups:
                    total = sum(float(3 ** int(m)) for m in group)
                    assert all(np.allclose(out[m], total) for m in group)


# Any shape.


def three_levels(library="ring", sizes=(2, 3, 4)):
    rates, latencies = (5e9, 2e10, 3e11), (1e-5, 5e-6, 2e-6)
    names = ("pod", "node", "gpu")
    levels = tuple(_level(*one) for one in zip(names, sizes, rates, latencies, strict=True))
    return sp.Topology("three", levels, library=library)


TOPOLOGIES = (
    lambda: sp.Topology.load("gcp-v100x8", nodes=2),
    lambda: sp.Topology.load("dgx-h100", nodes=4),
    lambda: three_levels("nccl"),
    lambda: three_levels("ring", (2, 2, 6)),
)
DIMS = (2, 3, 5, 7, 11, 13, 101, 499, 997, 7919)


def random_reduction(rng):
    """A placement, reduced axes, a type with addends, where they are to go, and the type then; other axes cut a dim."""
    topology = rng.choice(TOPOLOGIES)()
    a = rng.choice([n for n in range(2, topology.size + 1) if topology.size % n == 0])
    mesh = sp.Mesh(a=a, b=topology.size // a)
    placement = rng.choice(list(sp.placements(mesh, topology)))
    wide = [x for x, n in mesh.shape.items() if n > 1]
    axes = tuple(rng.sample(wide, rng.randint(1, len(wide))))
    axes = tuple(x for x in mesh.axes if x in axes)
    shape = [rng.choice((*DIMS, 2 ** rng.randint(1, 12), rng.randint(1, 3000))) for _ in range(rng.randint(1, 3))]
    before, after = [[()] * len(shape) for _ in range(2)]
    target = rng.choice(("replicated", "sharded", "root"))
    for x in wide:
        if x not in axes:
            d = rng.randrange(len(shape))
            shape[d] *= mesh.shape[x]
            before[d] = after[d] = (x,)
    if target == "sharded":
        d = rng.randrange(len(shape))
        shape[d] *= math.prod(mesh.shape[x] for x in axes)
        after[d] = (*before[d], *axes)
    source = sp.TensorType("f32", shape, tuple(before), mesh, partial=dict.fromkeys(axes, "sum"))
    wanted = sp.TensorType("f32", shape, tuple(after), mesh, root=axes if target == "root" else ())
    return placement, axes, target, source, wanted


def check_sums(plan, source, target):
    """Run a plan on random integers; every device ends with its part of the sum over all addends."""
    number = source.mesh.index((*source.layout.partial, *(a for d in source.layout.dims for a in d)))
    addends = [
        np.random.default_rng(int(k)).integers(-50, 50, source.local_shape(place)).astype(np.float32)
        for place, k in enumerate(number)
    ]
    expected = sp.distribute(sp.collect(addends, source), target)
    for held, x, y in zip(at_root(target), sp.run(plan, addends), expected, strict=True):
        assert not held or np.array_equal(x, y)


def test_any_shape_costs_what_its_payload_costs():
    """Also primes: only the padding of a payload, at most to the next multiple of its members, makes it dearer."""
    rng = random.Random(14)
    for _ in range(300):
        placement, axes, target, source, wanted = random_reduction(rng)
        if source.nbytes > 2e9:
            continue
        plan = sp.redistribute(source, wanted, topology=placement)
        plan.certificate.check()
        payload = source.local_bytes()
        members = 4 * math.prod(placement.mesh.shape[a] for a in axes)
        reduced = sp.reduce(placement, axes, payload, target=target)
        # A payload is padded, so that its parts are even; those of a shape may not be, and then go as messages.
        composed = any(step.op.algorithm for step in plan.program.steps)
        assert composed <= (placement.topology.library != "ring" and payload % members > 0)
        dearer, cheaper = (1.25, 0.87) if composed else (1.002, 0.998)
        assert plan.seconds <= reduced.seconds * dearer, (str(source), str(wanted), placement.describe())
        if payload % members == 0:
            assert plan.seconds >= reduced.seconds * 0.998
            if target == "replicated":
                best = sp.reductions(placement, axes, payload, limit=None, top=1, uncollapsed=True)[0]
                assert plan.seconds == pytest.approx(best.seconds, rel=2e-3)
        elif payload > members:
            less = sp.reduce(placement, axes, payload // members * members, target=target)
            assert plan.seconds >= less.seconds * cheaper
        if source.nbytes * source.mesh.size < 2e6:
            check_sums(plan, source, wanted)


def test_a_matrix_is_reduced_as_a_payload_is():
    mesh = sp.Mesh(data=16)
    placement = sp.Placement(mesh, sp.Topology.load("gcp-v100x8", nodes=2), ((2, 8),))
    plan = sp.redistribute("f32[8192, 8192]{+data}", "f32[8192, 8192]", mesh=mesh, topology=placement)
    assert [str(step.op.name) for step in plan.program.steps] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert plan.seconds == sp.reduce(placement, "data", 2**28).seconds
    assert plan.certificate.status == "exact"


def test_what_factors_do_not_divide_is_one_uneven_dim_and_nothing_is_padded():
    mesh = sp.Mesh(data=16)
    placement = sp.Placement(mesh, sp.Topology.load("gcp-v100x8", nodes=2), ((2, 8),))
    plan = sp.redistribute("f32[105, 7]{+data}", "f32[105, 7]", mesh=mesh, topology=placement)
    assert [f"{step.op.name} {t}" for step, t in zip(plan.program.steps, plan.certificate.types, strict=True)] == [
        "send f32[105, 7]{+data_node,+data_gpu}",
        "reshape f32[735]{+data_node,+data_gpu}",
        "reduce_scatter f32[735@data_gpu]{+data_node}",
        "all_reduce f32[735@data_gpu]",
        "all_gather f32[735]",
        "reshape f32[105, 7]",
        "send f32[105, 7]",
    ]
    assert plan.certificate.peak_bytes == plan.certificate.bound_bytes == 4 * 735
    check_sums(plan, plan.program.input_types[0], plan.program.output_types[0])
    # What is sharded stays major: the dims behind it are one with it, those before it stay apart.
    mesh = sp.Mesh(data=8, tensor=2)
    placement = sp.Placement(mesh, sp.Topology.load("gcp-v100x8", nodes=2), ((2, 4), (1, 2)))
    plan = sp.redistribute("f32[3, 14@tensor, 5]{+data}", "f32[3, 14@tensor, 5]", mesh=mesh, topology=placement)
    assert "f32[3, 70@(tensor,data_gpu)]{+data_node}" in map(str, plan.certificate.types)
    check_sums(plan, plan.program.input_types[0], plan.program.output_types[0])


def test_levels_that_prime_order_does_not_show_get_axes_of_their_own():
    mesh = sp.Mesh(data=12)
    topology = sp.Topology("t", (_level("node", 3, 1e9, 1e-6), _level("gpu", 4, 1e11, 1e-6)))
    placement = sp.Placement(mesh, topology, ((3, 4),))
    source, target = "f32[48, 5]{+data}", "f32[48@data, 5]"
    plan = sp.redistribute(source, target, mesh=mesh, topology=placement)
    assert [step.op.name for step in plan.program.steps] == [
        "send",
        "reshape",
        "reduce_scatter",
        "reduce_scatter",
        "reshape",
        "send",
    ]
    assert plan.certificate.status == "exact"
    check_sums(plan, *(sp.TensorType.parse(text, mesh) for text in (source, target)))


def test_steps_of_a_longer_plan_are_cut_at_the_levels():
    mesh = sp.Mesh(a=2, b=8)
    placement = sp.Placement(mesh, sp.Topology.load("gcp-v100x8", nodes=2), ((1, 2), (2, 4)))
    source, target = "f32[128, 128, 128@a]{+b}", "f32[128, 128@a, 128]"
    plan = sp.redistribute(source, target, mesh=mesh, topology=placement)
    names = [step.op.name for step in plan.program.steps]
    assert names[:3] == ["reduce_scatter", "all_reduce", "all_gather"]
    check_sums(plan, *(sp.TensorType.parse(text, mesh) for text in (source, target)))


def test_devices_with_equal_addends_share_the_work():
    mesh = sp.Mesh(data=2, copies=8)
    placement = sp.Placement(mesh, sp.Topology.load("gcp-v100x8", nodes=2), ((2, 1), (1, 8)))
    plan = sp.redistribute("f32[8192, 8192]{+data}", "f32[8192, 8192]", mesh=mesh, topology=placement)
    assert plan.seconds < sp.reduce(placement, "data", 2**28).seconds / 4
    assert plan.certificate.status != "exact"


# Prices.


@given(systems(depth=3), st.floats(2.0, 16.0))
@settings(max_examples=30, deadline=None)
def test_bandwidth_scales_and_bytes_are_monotone(placement, factor):
    levels = tuple(replace(level, bandwidth=level.bandwidth * factor) for level in placement.topology.levels)
    fast = replace(placement, topology=replace(placement.topology, levels=levels))
    nbytes = 4 * placement.mesh.size * 1000
    base = sp.reduce(placement, "a", nbytes).seconds
    assert sp.reduce(fast, "a", nbytes).seconds == pytest.approx(base / factor, rel=1e-9)
    assert sp.reduce(placement, "a", nbytes * 2).seconds >= base


@pytest.mark.parametrize(("n", "g"), [(2, 4), (2, 16), (4, 8), (8, 2)])
def test_closed_form(n, g):
    inner, outer = 135e9, 8e9
    placement = next(sp.placements(sp.Mesh(a=n * g), switches((n, outer), (g, inner))))
    nbytes = 4 * n * g * 1000
    found = {str(r): r.seconds for r in sp.reductions(placement, "a", nbytes, algorithm="ring")}
    k, s = n * g, 1
    flat = max(s * 2 * (k - 1) / k * nbytes / outer, 2 * (k - 1) / k * nbytes / inner)
    assert found["(root, InsideGroup, AllReduce)"] == pytest.approx(flat, rel=1e-9)
    name = "(l0, InsideGroup, ReduceScatter); (l0, Parallel(root), AllReduce); (l0, InsideGroup, AllGather)"
    three = 2 * (g - 1) / g * nbytes / inner + g * 2 * (n - 1) / n * (nbytes / g) / outer
    assert found[name] == pytest.approx(three, rel=1e-9)
    # Volume alone caps the ratio at n (ng - 1) / (ng (n - 1)).
    assert flat / three < n * (k - 1) / (k * (n - 1))


def test_one_group_alone_would_err_by_the_groups_on_a_port():
    topology = switches((2, 8e9), (8, 135e9))
    placement = sp.Placement(sp.Mesh(data=2, tensor=8), topology, ((2, 1), (1, 8)))
    across = Instruction(Grouping((0,)), "all_reduce")
    rate = instruction_lines(across, (factors(placement, "data")[0].strides,), topology, "ring")[0][1]
    assert rate == pytest.approx(8 / 8e9)


# Mistakes.


def test_a_wrong_path_is_refused():
    placement = next(sp.placements(sp.Mesh(a=8), switches((2, 1e9), (4, 1e10))))
    view = payload(placement, "a", 4096)
    path = view.cheapest(placement.topology, "PP", "UU", "ring").edges
    check_path(view.sizes, path, "UU")
    with pytest.raises(CertificateError, match="the state-matrix checker refuses the program found"):
        check_path(view.sizes, path[:-1], "UU")


def test_errors_say_what_is_legal():
    placement = next(sp.placements(sp.Mesh(a=8), switches((2, 1e9), (4, 1e10))))
    with pytest.raises(LayoutError, match="limit is 0 instructions; legal are 1 or more"):
        sp.reductions(placement, "a", 1e6, limit=0)
    for limit in (5, None):
        with pytest.raises(LayoutError, match="top is 0 programs; legal are 1 or more, or None"):
            sp.reductions(placement, "a", 1e6, limit, top=0)
    with pytest.raises(LayoutError, match="a reduction of 0 bytes: the payload of a device is above 0"):
        sp.reduce(placement, "a", 0)
    with pytest.raises(LayoutError, match="target 'half' is unknown; legal are replicated, sharded, root"):
        sp.reduce(placement, "a", 1e6, target="half")
    with pytest.raises(TopologyError, match="cannot reduce over 'b': the mesh has a=8"):
        sp.reduce(placement, "b", 1e6)
    deep = next(sp.placements(sp.Mesh(a=32), switches(*((2, 1e9),) * 5)))
    with pytest.raises(Infeasible, match="over 5 levels are not enumerated, at most 4 levels are"):
        sp.reductions(deep, "a", 1e6)
    assert len(sp.reduce(deep, "a", 1e6).program.steps) >= 1
    with pytest.raises(TopologyError, match="algorithm 'magic' is unknown"):
        sp.reduce(placement, "a", 1e6, algorithm="magic")


def test_axes_of_size_one_need_nothing():
    placement = sp.Placement(sp.Mesh(a=4, b=1), switches((4, 1e9)), ((4,), (1,)))
    assert sp.reduce(placement, "b", 100).program.steps == ()
    assert sp.reductions(placement, "b", 100)[0].instructions == ()


def test_edge_costs_are_those_of_the_typed_steps():
    placement = next(sp.placements(sp.Mesh(a=8), switches((2, 1e9), (2, 1e10), (2, 1e11), latency=1e-6)))
    view = payload(placement, "a", 2**16)
    space = reduction_space(3)
    costs = edge_costs(space, view.strides, view.nbytes, placement.topology)
    from shardplan.hardware.prices.cost import price
    from shardplan.plans.pricing import fabric_of

    fabric = fabric_of(placement, (view.whole.mesh,))
    for k, cost in enumerate(costs):
        edge = space.edge(k)
        pattern = view.ops([edge])[-1].pattern(view.type(edge.entered))
        assert cost == pytest.approx(price(pattern, fabric).seconds, rel=1e-9)
