"""Parts of the drop-ins for DTensor without a process group: states by name, ties, what ranks hold together, waits."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan import Topology  # noqa: E402
from shardplan.core.accounting import account  # noqa: E402
from shardplan.errors import Infeasible, LayoutError  # noqa: E402
from shardplan.interop.torch.bound_move import BoundMove  # noqa: E402
from shardplan.interop.torch.compile import _topologies, _topology_number  # noqa: E402
from shardplan.interop.torch.ends import Ends  # noqa: E402
from shardplan.interop.torch.pending_moves import settle, start_move  # noqa: E402
from shardplan.interop.torch.state import plan as state_plan  # noqa: E402
from shardplan.interop.torch.state.names import rebuild_state, remove  # noqa: E402
from shardplan.interop.torch.state.ties import ties  # noqa: E402
from shardplan.interop.torch.state.view import (  # noqa: E402
    Grid,
    Held,
    Source,
    StateView,
    moved_tensors,
    refuse_unlike,
    same_digests,
)
from shardplan.movement.redistribute import plan_kept  # noqa: E402

Pair = namedtuple("Pair", "first second")


def mesh_of(*ranks: int) -> DeviceMesh:
    """A mesh of one dim without processes."""
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=ranks[0])


def spec_of(mesh: DeviceMesh, shape: tuple[int, ...], *placements: Any) -> DTensorSpec:
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), strides, torch.float32))


def view_of(*held: tuple[str, Source, bool], tie: str | None = None) -> StateView:
    """What a rank brings: names, where they lie, whether they outlive the state; all are wanted whole."""
    found = {((name,), s.grid): Held(s, (Replicate(),), None if tie is None else (tie,), k) for name, s, k in held}
    return StateView({}, found)


def test_a_state_keeps_its_kinds_of_containers() -> None:
    state = {"pair": Pair(1, [2, 3]), "plain": (4, 5)}
    made = rebuild_state(state, {("pair", "first"): 0, ("pair", 0): 10, ("plain", 1): 50, ("pair", 1, 0): 20})
    assert made == {"pair": Pair(10, [20, 3]), "plain": (4, 50)}
    assert type(made["pair"]) is Pair and type(made["plain"]) is tuple
    assert state == {"pair": Pair(1, [2, 3]), "plain": (4, 5)}


def test_what_is_removed_moves_nothing_else() -> None:
    state: dict[str, Any] = {"list": ["a", "b", "c"], "dict": {"x": 1, "y": 2}}
    remove(state, [("list", 0), ("list", 2), ("dict", "x")])
    assert state == {"list": [None, "b", None], "dict": {"y": 2}}


@pytest.mark.parametrize(("stop", "start", "apart"), [(3, 2, False), (3, 3, True), (2, 4, True), (6, 0, False)])
def test_views_that_share_an_element_are_refused(stop: int, start: int, apart: bool) -> None:
    flat = torch.arange(6.0)
    mesh = mesh_of(0)
    views = {"a": flat[:stop], "b": flat[start:]}
    tensors = {
        (k,): DTensor(x, spec_of(mesh, tuple(x.shape), Replicate()), requires_grad=False) for k, x in views.items()
    }
    if apart or stop - 0 == 6 - start:
        assert ties(tensors, {("a",)}) == (
            {("a",): ("a",), ("b",): ("b",)} if apart else {("a",): ("a",), ("b",): ("a",)}
        )
        return
    with pytest.raises(LayoutError, match="a and b are different views of the same elements"):
        ties(tensors, {("a",)})


def test_what_one_rank_keeps_is_kept() -> None:
    mesh = mesh_of(0, 1)
    source = Source.of(spec_of(mesh, (4,), Shard(0)))
    for mine, theirs in ((True, False), (False, True), (False, False), (True, True)):
        both = view_of(("w", source, mine)) + view_of(("w", source, theirs))
        assert not both.error
        (moved,) = moved_tensors(both, None, {source.grid: mesh})
        assert moved.kept == (mine or theirs)


def test_a_tied_tensor_outlives_the_state_where_one_of_its_names_does() -> None:
    mesh = mesh_of(0, 1)
    source = Source.of(spec_of(mesh, (4,), Shard(0)))
    for a, b in ((True, False), (False, True), (False, False)):
        (moved,) = moved_tensors(view_of(("a", source, a), ("b", source, b), tie="a"), None, {source.grid: mesh})
        assert moved.paths == (("a",), ("b",)) and moved.kept == (a or b)


def test_copies_on_two_meshes_are_one_tensor_in_the_same_order() -> None:
    """Of stages of 2 x 2 ranks: mesh dims count one more behind that of the copies, in the order of sharding too."""
    sources = []
    for first in (0, 4):
        mesh = DeviceMesh("cpu", torch.arange(first, first + 4).reshape(2, 2), _init_backend=False, _rank=first)
        meta = TensorMeta(torch.Size((8,)), (1,), torch.float32)
        order = (ShardOrderEntry(0, (1, 0)),)
        sources.append(Source(Grid.of(mesh), (Shard(0), Shard(0)), order, None, meta))
    held = {(("w",), s.grid): Held(s, (Replicate(),) * 3, None, False) for s in sources}
    whole = DeviceMesh("cpu", torch.arange(8).reshape(2, 2, 2), _init_backend=False, _rank=0)
    (moved,) = moved_tensors(StateView({}, held), whole, {Grid.of(whole): whole})
    assert moved.source.placements == (Replicate(), Shard(0), Shard(0))
    assert moved.source.mesh.mesh.tolist() == torch.arange(8).reshape(2, 2, 2).tolist()
    assert moved.source.shard_order == (ShardOrderEntry(0, (2, 1)),)


def test_copies_on_meshes_that_share_a_rank_are_refused() -> None:
    whole = mesh_of(0, 1, 2)
    held = {}
    for mesh in (mesh_of(0, 1), mesh_of(1, 2)):
        source = Source.of(spec_of(mesh, (4,), Shard(0)))
        held[("w",), source.grid] = Held(source, (Replicate(),), None, False)
    with pytest.raises(LayoutError, match=r"w: held on several meshes, .*; legal are copies in one layout on meshes"):
        moved_tensors(StateView({}, held), whole, {})


def test_copies_whose_digests_differ_on_any_rank_are_refused() -> None:
    a, b, c = ({(("w",), 0): "x", (("v",), 0): n, (("u",), k): "z"} for k, n in enumerate("pqp"))
    refuse_unlike(same_digests(a, c))
    for first, second in ((a, b), (b, a)):
        joined = same_digests(first, second)
        assert same_digests(joined, c) == joined | c | {(("v",), 0): ""}  # what has differed differs
        with pytest.raises(LayoutError, match=r"^v: held on several meshes with other values on each"):
            refuse_unlike(joined)


@pytest.mark.parametrize(
    ("dtype", "reduction", "divided", "partitions"),
    [
        (torch.float32, "sum", (2.0,), False),
        (torch.int32, "sum", (), True),
        (torch.float32, "product", (), True),
        (torch.float32, "avg", (), False),
        (torch.int32, "max", (), False),
    ],
)
def test_a_whole_value_becomes_addends_as_its_dtype_allows(
    dtype: torch.dtype, reduction: str, divided: tuple[float, ...], partitions: bool
) -> None:
    """Floats are divided; integers, and factors, are kept by one rank; means, max and min stand on every rank."""
    mesh = mesh_of(0, 1)
    meta = TensorMeta(torch.Size((4,)), (1,), dtype)
    source, target = (DTensorSpec(mesh, (p,), tensor_meta=meta) for p in (Replicate(), Partial(reduction)))
    ends = Ends.of(source, target)
    assert (ends.divisors, ends.partitions) == (divided, partitions)


def test_a_move_that_failed_says_so_at_every_use() -> None:
    def moving():
        yield
        raise RuntimeError("a peer is gone")

    result = start_move(moving(), (2,), torch.float32, torch.device("cpu"))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="a peer is gone"):
            result + 1
    settle()


def test_every_topology_has_its_own_number() -> None:
    first, second = (Topology.load("dgx-a100", nodes=n) for n in (1, 2))
    numbers = [_topology_number(t) for t in (first, second, first, second)]
    assert numbers[:2] == numbers[2:] and numbers[0] != numbers[1]
    assert [_topologies[k] for k in numbers] == [first, second, first, second]


@pytest.mark.parametrize("after", [Replicate(), Shard(1)])
@pytest.mark.parametrize("travels", [torch.float64, torch.float32, torch.bfloat16])
def test_the_shard_that_is_copied_counts_beside_the_move(after: Any, travels: torch.dtype) -> None:
    """What the caller keeps, 64 bytes, lies there while the copy of another dtype moves: the least is of both."""
    mesh = mesh_of(0, 1, 2, 3)
    source, target = spec_of(mesh, (8, 8), Shard(0)), spec_of(mesh, (8, 8), after)
    ends = Ends.of(source, target, travels)
    with pytest.raises(Infeasible) as error:
        BoundMove(ends, 0, 1, None)
    least = error.value.least_bytes
    assert least is not None and ends.types is not None
    with pytest.raises(Infeasible):
        BoundMove(ends, 0, least - 1, None)
    BoundMove(ends, 0, least, None)
    kept = 0 if ends.copies else 64
    copies = plan_kept(*ends.types, memory_limit=least - (64 - kept), keep=not ends.copies)
    assert account(copies.program).workspace_bytes + 64 - kept <= least


def test_a_batch_without_a_limit_stages_a_tenth_and_a_constant(monkeypatch):
    """Or the least that works: then it is what a limit would name."""
    mesh = sp.Mesh(d=4)
    many = [tuple(sp.TensorType.parse(x, mesh) for x in ("f32[64@d, 64]", "f32[64, 64@d]"))] * 24
    tiny = [tuple(sp.TensorType.parse(x, mesh) for x in ("f32[8@d, 4]", "f32[8, 4@d]"))]
    monkeypatch.setattr(state_plan, "STAGED_BYTES", 0)
    given = 24 * 4096
    program = state_plan._plan_batch(many, None, None, [True] * 24)
    assert account(program).workspace_bytes <= 2.1 * given
    assert account(sp.redistribute(*zip(*many, strict=True)).program).workspace_bytes > 2.9 * given
    with pytest.raises(Infeasible) as caught:
        state_plan._plan_batch(tiny, None, 67, [True])
    assert account(state_plan._plan_batch(tiny, None, None, [True])).workspace_bytes == caught.value.least_bytes > 67
