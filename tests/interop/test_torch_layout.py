"""DTensor's placements as types, without a process group: a type says what DTensor's own index function says, or none.

`DeviceMesh` is made without its backend, so nothing here communicates.
"""

import itertools
import math

import pytest

torch = pytest.importorskip("torch")
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan.interop.torch.boxes import BoxMove  # noqa: E402
from shardplan.interop.torch.layout import (  # noqa: E402
    MEANINGS,
    holdings,
    parse_shard_order,
    reduction_of,
    type_at_coordinate,
    type_of,
)

CUTS = (Replicate(), Shard(0), *(_StridedShard(0, split_factor=k) for k in (2, 3, 4)))


def spec(sizes: tuple[int, ...], n: int, placements) -> DTensorSpec:
    """Of `n` elements on a mesh without processes."""
    mesh = DeviceMesh("cpu", torch.arange(math.prod(sizes)).reshape(sizes), _init_backend=False, _rank=0)
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


@pytest.mark.parametrize("rank", range(6))
def test_boxes_bring_every_element_once(rank: int) -> None:
    """Of 13 elements cut two ways: what comes and what stays is the whole shard, and others send what comes."""
    cuts = (
        (_StridedShard(0, split_factor=2), Shard(0)),
        (Replicate(), Shard(0)),
        (Shard(0), _StridedShard(0, split_factor=3)),
    )
    for before, after in itertools.permutations(cuts, 2):
        moves = [BoxMove(spec((3, 2), 13, before), spec((3, 2), 13, after), r) for r in range(6)]
        mine = moves[rank]
        came = {t.peer: t.elements for t in mine.receives}
        assert sum(came.values()) + sum(view.elements for view, _ in mine.copies) == math.prod(mine.result_shape)
        assert came == {r: t.elements for r, move in enumerate(moves) for t in move.sends if t.peer == rank}


def test_of_several_holders_the_next_in_the_order_of_ranks_gives() -> None:
    """Element by element: what a rank does not hold comes from the first behind it, round the end, that does."""
    for sizes, before in (((3, 2), (Replicate(), Shard(0))), ((2, 3), (Replicate(), _StridedShard(0, split_factor=2)))):
        source, target = spec(sizes, 13, before), spec(sizes, 13, (Replicate(), Replicate()))
        sides = (holdings(x.shape, x.placements, x.mesh, x.shard_order) for x in (source, target))
        held, wanted = ({r: {i for a, _, n in h.runs[0] for i in range(a, a + n)} for r, h in x.items()} for x in sides)
        for r in range(6):
            givers = [min((s for s in held if i in held[s]), key=lambda s: (s - r) % 6) for i in wanted[r] - held[r]]
            came = {t.peer: t.elements for t in BoxMove(source, target, r).receives}
            assert came == {s: givers.count(s) for s in sorted(set(givers))}


@pytest.mark.parametrize("rank", range(6))
def test_a_limit_with_room_changes_no_reduction(rank: int) -> None:
    after = (_StridedShard(0, split_factor=2), Shard(0))
    for before in ((Shard(0), Partial()), (Partial(), Shard(0)), (Partial(), Partial())):
        free, within = (BoxMove(spec((3, 2), 13, before), spec((3, 2), 13, after), rank, m) for m in (None, 1 << 20))
        assert free.reduction is not None
        assert within.texts == free.texts
