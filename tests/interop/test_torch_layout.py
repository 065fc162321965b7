"""DTensor's placements as types, without a process group: a type says what DTensor's own index function says, or none.

`DeviceMesh` is made without its backend, so nothing here communicates.
"""

import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan.core.accounting import account  # noqa: E402
from shardplan.core.reference import run_reference  # noqa: E402
from shardplan.execution.verify import verify  # noqa: E402
from shardplan.interop.torch.bound_move import BoundMove  # noqa: E402
from shardplan.interop.torch.ends import Ends  # noqa: E402
from shardplan.interop.torch.layout import (  # noqa: E402
    MEANINGS,
    holdings,
    parse_shard_order,
    reduction_of,
    type_at_coordinate,
    type_of,
    whole_type_of,
)

CUTS = (Replicate(), Shard(0), *(_StridedShard(0, split_factor=k) for k in (2, 3, 4)))


def spec(sizes: tuple[int, ...], n: int, placements, rank: int = 0) -> DTensorSpec:
    """Of `n` elements on a mesh without processes, as this rank has it."""
    mesh = DeviceMesh("cpu", torch.arange(math.prod(sizes)).reshape(sizes), _init_backend=False, _rank=rank)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size((n,)), (1,), torch.float32))


@pytest.mark.parametrize("sizes", [(3, 2), (2, 2, 2)])
def test_a_type_is_what_devices_hold(sizes: tuple[int, ...]) -> None:
    typed = 0
    for n, cuts in itertools.product((*range(1, 9), 12, 13), itertools.product(CUTS, repeat=len(sizes))):
        asked = spec(sizes, n, cuts)
        t = type_of(asked)
        if t is None:
            continue
        typed += any(isinstance(p, _StridedShard) for p in cuts)
        held = holdings(asked.shape, asked.placements, asked.mesh, asked.shard_order)
        for ((start, stop),), device in zip(t.boxes().tolist(), t.mesh.devices, strict=True):
            assert held[device].runs == (((start, 0, stop - start),) if stop > start else (),), (t, device)
    assert typed


def test_on_an_uneven_dim_a_strided_shard_is_no_type() -> None:
    """Of 13 elements device 4 holds the 7th and the 12th, which no box does; of 12 two neighbours."""
    cuts = (_StridedShard(0, split_factor=2), Shard(0))
    assert str(type_of(spec((3, 2), 12, cuts))) == "f32[12@(d1,d0)]"
    odd = spec((3, 2), 13, cuts)
    assert type_of(odd) is None
    assert holdings(odd.shape, odd.placements, odd.mesh, odd.shard_order)[4].runs == (((6, 0, 1), (11, 1, 1)),)


@pytest.mark.parametrize("order", [((0, (0, 1)), (0, (0, 1))), ((0, (1, 0)), (0, (0, 1)))])
def test_an_order_says_every_dim_once(order) -> None:
    with pytest.raises(sp.LayoutError) as error:
        parse_shard_order(order, (Shard(0), Shard(0)))
    legal = "legal are the orders of the mesh dims in [(0, (0, 1))]"
    assert str(error.value) == f"shard_order={order!r} for the placements (Shard(dim=0), Shard(dim=0)); {legal}"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32])
def test_averages_are_of_what_can_be_divided(dtype) -> None:
    with pytest.raises(sp.LayoutError) as error:
        reduction_of(Partial("avg"), dtype)
    legal = "legal are floats of 16 bits and more, and complex numbers"
    assert str(error.value) == f"Partial(avg) is not defined for {dtype}; {legal}"


@pytest.mark.parametrize("meaning", MEANINGS)
def test_a_placement_with_a_meaning_of_its_own_is_refused(meaning: str) -> None:
    own = type("Own", (Partial,), {meaning: lambda *_: None})("sum")
    with pytest.raises(sp.LayoutError) as error:
        reduction_of(own, torch.float32)
    assert str(error.value).startswith(f"{own!r} is not supported; legal are Partial(sum), ")


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_addends_on_a_part_of_the_mesh_have_the_reduction_of_the_whole(reduction: str) -> None:
    mark = "+" if reduction == "sum" else f"{reduction}:"
    t = sp.TensorType("f32", (4,), ((),), sp.Mesh(a=2, b=2), partial={"a": reduction, "b": reduction})
    found = type_at_coordinate(t, [0], (1, 0))
    assert str(found) == f"f32[4]{{{mark}b}}" and found.mesh == sp.Mesh(b=2, devices=[2, 3])


ODD = (
    (_StridedShard(0, split_factor=2), Shard(0)),
    (Replicate(), Shard(0)),
    (Shard(0), _StridedShard(0, split_factor=3)),
)


def move_of(before, after, rank: int = 0, limit: int | None = None) -> BoundMove:
    """Of 13 elements on 3 x 2 ranks."""
    source, target = (spec((3, 2), 13, placements, rank) for placements in (before, after))
    return BoundMove(Ends.of(source, target), rank, limit, None)


def held_indices(placements) -> list[list[int]]:
    """By rank the indices of the 13 elements that it holds, in the order of its shard, from DTensor's own function."""
    cut = [Replicate() if isinstance(p, Partial) else p for p in placements]
    found = spec((3, 2), 13, cut)
    held = holdings(found.shape, found.placements, found.mesh)
    return [[i for start, _, n in held[r].runs[0] for i in range(start, start + n)] for r in range(6)]


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(ODD, 2)))
def test_a_move_of_boxes_is_a_program(before, after) -> None:
    """The same on all ranks; the reference runs it to what DTensor's indices say; its certificate holds."""
    moves = [move_of(before, after, r) for r in range(6)]
    assert len({(move.digest, move.name, move.ranks, *move.texts) for move in moves}) == 1
    (bound,) = moves[0].programs
    ends = moves[0].ends.types
    assert ends is not None and (bound.program.input_types, bound.program.output_types) == ((ends[0],), (ends[1],))
    (got,) = run_reference(bound.program, [[np.array(held, np.float32) for held in held_indices(before)]])
    assert [x.tolist() for x in got] == held_indices(after)
    assert [move.result_shape for move in moves] == [x.shape for x in got]
    plan = sp.redistribute(*ends)
    plan.certificate.check()
    assert plan.program == bound.program and verify(plan).complete and plan.certificate.gap == 1
    had = [set(held) for held in held_indices(before)]
    lack = [4 * len(set(wanted) - mine) for wanted, mine in zip(held_indices(after), had, strict=True)]
    assert list(plan.certificate.received_bytes) == lack


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(ODD, 2), ((Shard(0), Partial()), ODD[0])])
def test_a_limit_on_boxes_is_the_accounts(before, after) -> None:
    """The least that is named works and the least at all is the last that does; the caller's shard counts beside."""
    with pytest.raises(sp.Infeasible) as error:
        move_of(before, after, limit=1)
    least, absolute = error.value.least_bytes, error.value.absolute_least_bytes
    assert least is not None and absolute is not None and f"the least that works is {least} bytes" in str(error.value)
    with pytest.raises(sp.Infeasible):
        move_of(before, after, limit=absolute - 1)
    own = 4 * max(map(len, held_indices(before)))
    for limit in {absolute, least}:
        move = move_of(before, after, limit=limit)
        reduces = isinstance(before[1], Partial)
        beside = (0, own) if reduces else (0,)
        books = [account(bound.program).workspace_bytes + n for bound, n in zip(move.programs, beside, strict=True)]
        assert max(books) <= limit and (limit > absolute or max(books) == limit)


@pytest.mark.parametrize("rank", range(6))
def test_addends_beside_boxes_are_reduced_first(rank: int) -> None:
    """By a program of the ranks that hold addends of one shard, in its elements; a limit with room changes none."""
    for before in ((Shard(0), Partial()), (Partial(), Shard(0)), (Partial("max"), Partial("max"))):
        free, within = (move_of(before, ODD[0], rank, m) for m in (None, 1 << 20))
        reduction, move = free.programs
        peers = [r for r in range(6) if held_indices(before)[r] == held_indices(before)[rank]]
        (t,) = reduction.program.input_types
        assert list(reduction.ranks) == peers and t.shape == (len(held_indices(before)[rank]),)
        assert set(t.layout.partial) == {f"d{k}" for k, p in enumerate(before) if isinstance(p, Partial)}
        assert t.layout.reduction == next(p.reduce_op for p in before if isinstance(p, Partial))
        assert within.texts == free.texts == [*reduction.texts, *move.texts]
        (whole,) = move.program.input_types
        assert not whole.layout.partial and free.digest == move_of(before, ODD[0], 0).digest


def test_addends_that_stay_beside_boxes_are_moved_by_themselves() -> None:
    """Between ranks of one coordinate: 3 and 5 of those of 1, and no other."""
    before, after = (_StridedShard(0, split_factor=2), Partial()), (Replicate(), Partial())
    found = spec((3, 2), 13, before, 5)
    boxed = whole_type_of(found)
    assert boxed is not None and boxed.layout.boxes is not None and boxed.mesh.size == 6
    move = move_of(before, after, 5)
    assert move.ranks == (1, 3, 5) and not move.ends.reduced and move.ends.types is not None
    (bound,) = move.programs
    held = [np.array(held_indices(before)[r], np.float32) for r in (1, 3, 5)]
    (got,) = run_reference(bound.program, [held])
    assert [x.tolist() for x in got] == [list(range(13))] * 3


def test_without_elements_there_is_no_program() -> None:
    source, target = (spec((3, 2), 0, placements, 1) for placements in (ODD[0], ODD[1]))
    move = BoundMove(Ends.of(source, target), 1, 8, None)
    assert not move.programs and move.texts == [] and move.result_shape == (0,) and move.ranks == tuple(range(6))


def test_addends_reduced_in_place_are_a_new_shard() -> None:
    """Where the boxes stay nothing moves but the addends; without addends the shard itself is given."""
    before = (_StridedShard(0, split_factor=2), Partial())
    for source, fresh in ((before, True), ((before[0], Replicate()), False)):
        move = move_of(source, (before[0], Replicate()))
        assert move.ends.fresh == fresh and len(move.programs) == 1 + fresh
        assert not move.programs[-1].program.steps
