"""Whatever way a process group is made, its library for CUDA tensors moves them: what ranks post, on a stand-in."""

import re
import threading
import warnings
from collections import defaultdict
from typing import Any

import pytest

import shardplan as sp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

from execution.cuda_stand_in import WAYS, Post, known, rank_of  # noqa: E402
from shardplan.execution.torch.dtypes import torch_dtype  # noqa: E402
from shardplan.execution.torch.faults import TorchWatch  # noqa: E402
from shardplan.execution.torch.group_state import GroupState, group_state  # noqa: E402
from shardplan.execution.torch.libraries import _tell_once, device_among, libraries_of  # noqa: E402
from shardplan.execution.torch.run import _identity, executable, run_program  # noqa: E402
from shardplan.interop.torch import moves, redistribute  # noqa: E402

RANKS = 4
MESH, LOW, HIGH = sp.Mesh(a=2, b=2), sp.Mesh(c=2), sp.Mesh({"d": 2}, devices=[2, 3])


def planned(source: str, destination: str, meshes: tuple[sp.Mesh, sp.Mesh] = (MESH, MESH)) -> sp.Program:
    ends = (sp.TensorType.parse(text, mesh) for text, mesh in zip((source, destination), meshes, strict=True))
    return sp.redistribute(*ends).program


PROGRAMS = {  # by what it is: the program, and the calls of the library that it holds on every rank
    "gather": (planned("f32[8@(a,b), 3]", "f32[8@a, 3]"), ["allgather_base"]),
    "exchange of dims": (planned("bf16[8@(a,b), 8]", "bf16[8@a, 8@b]"), ["alltoall_base"]),
    "scatter": (planned("f32[8, 5]{+a,+b}", "f32[8@(a,b), 5]"), ["reduce_scatter_base"]),
    "reduce": (planned("i64[6]{max:a}", "i64[6]"), ["allreduce"]),
    "uneven": (planned("i32[7@(a,b)]", "i32[7]"), []),
    "permute": (planned("i32[8@(a,b)]", "i32[8@(b,a)]"), []),
    "to ranks that only receive": (planned("f32[8@c]", "f32[8@d]", (LOW, HIGH)), []),
    "from ranks that only send": (planned("f32[8@c, 4]", "f32[8, 4@d]", (LOW, HIGH)), []),
    "to more ranks": (planned("f32[8@c, 4]", "f32[8@(a,b), 4]", (LOW, MESH)), []),
    "from more ranks": (planned("f32[8@(a,b), 4]", "f32[8@d, 4]", (MESH, HIGH)), []),
}


def posted(program: sp.Program, way: str | None, kind: str = "cuda") -> dict[int, list[Post]]:
    """What every rank posts, its shards and its results lying on devices of that kind."""
    out: dict[int, list[Post]] = {}
    for rank in program.devices:
        with rank_of(way, rank, RANKS) as posts:
            known(executable(program, rank))
            given: list[Any] = [
                [torch.empty(t.local_shape(t.mesh.devices.index(rank)), dtype=torch_dtype(t.dtype), device=kind)]
                if rank in t.mesh.devices
                else []
                for t in program.input_types
            ]
            found = run_program(program, given, timeout=5.0)
            assert {x.device.type for shards in found for x in shards} <= {kind}
        out[rank] = posts
    return out


def unmet(found: dict[int, list[Post]]) -> dict[Any, Any]:
    """Messages by sender and receiver that one posts and the other does not, or in another order."""
    sides: dict[str, Any] = {"send": defaultdict(list), "recv": defaultdict(list)}
    for rank, posts in found.items():
        for one in posts:
            if one.op in sides:
                ends = (rank, one.peer) if one.op == "send" else (one.peer, rank)
                sides[one.op][ends].append((one.ranks, one.device, one.nbytes, one.tag))
    return {} if sides["send"] == sides["recv"] else sides


@pytest.mark.parametrize("name", PROGRAMS)
def test_records_are_equal_however_the_group_was_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDPLAN_NATIVE", raising=False)
    program, library_calls = PROGRAMS[name]
    first, *others = (posted(program, way) for way in WAYS)
    assert others == [first, first]
    assert unmet(first) == {}
    for posts in first.values():
        assert {one.device for one in posts} <= {"cuda"}
        assert [one.op for one in posts if one.op not in ("send", "recv")] == library_calls
        assert {one.tag for one in posts} <= {-1, 0}  # of nccl, which has none


def moved_dtensor(way: str | None, rank: int, ranks: list[int] | None, placements: Any) -> list[Post]:
    with rank_of(way, rank, RANKS) as posts:
        moves._moves.clear()  # they are of a rank, of which a process is one
        with _disable_current_modes():
            source, target = (DeviceMesh("cuda", ids, _init_backend=False) if ids else None for ids in ([0, 1], ranks))
            assert source is not None
        rows = 4 if rank < 2 else 0
        x = DTensor.from_local(
            torch.empty(rows, 6, device="cuda"), source, [Shard(0)], run_check=False, shape=(8, 6), stride=(6, 1)
        )
        with _disable_current_modes():
            move = moves.plan_dtensor_move(x, placements, target, None, None, (None, None, 5.0))
        assert move is not None
        known(move.bound)
        y = redistribute(x, placements, target, timeout=5.0)
        assert y.to_local().device.type == "cuda"
    moves._moves.clear()
    return posts


def test_a_dtensor_to_ranks_that_only_receive() -> None:
    first, *others = ({r: moved_dtensor(way, r, [2, 3], [Shard(1)]) for r in range(RANKS)} for way in WAYS)
    assert others == [first, first]
    assert unmet(first) == {}
    assert {one.op for one in first[2]} == {"recv"} == {one.op for one in first[3]}
    alone = moved_dtensor(WAYS[2], 0, None, [Replicate()])
    assert [one.op for one in alone] == ["allgather_base"]


def test_where_a_group_has_two_libraries_tensors_on_the_host_go_by_the_hosts() -> None:
    program = PROGRAMS["gather"][0]
    found = posted(program, "cuda:nccl,cpu:gloo", "cpu")
    assert unmet(found) == {}
    assert {(one.op, one.device) for posts in found.values() for one in posts} == {("send", "cpu"), ("recv", "cpu")}
    assert all(one.tag > 0 for posts in found.values() for one in posts)


@pytest.mark.parametrize(
    ("libraries", "kind", "device"),
    [
        ({"cuda": "nccl"}, "", "cuda"),
        ({"cpu": "gloo", "cuda": "nccl"}, "", "cuda"),
        ({"cuda": "nccl", "cpu": "gloo"}, "cpu", "cpu"),
        ({"cpu": "gloo", "cuda": "gloo"}, "", "cpu"),
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", "cuda"),
        ({"cpu": "gloo"}, "", "cpu"),
    ],
)
def test_where_a_rank_that_only_receives_has_its_memory(libraries: dict[str, str], kind: str, device: str) -> None:
    with rank_of(None, 0, 1):
        assert device_among(libraries, kind).type == device


def test_what_is_on_the_host_is_refused_by_a_library_of_gpus() -> None:
    program = PROGRAMS["gather"][0]
    with rank_of(None, 1, RANKS):
        known(executable(program, 1))
        with pytest.raises(sp.LayoutError) as caught:
            run_program(program, [[torch.empty(2, 3)]], timeout=5.0)
    assert re.fullmatch(
        r"program \w{8}: rank 1 has its shards on cpu, but its process group carries cuda \(nccl\) only; rank 1 sent "
        r"nothing",
        str(caught.value),
    )


def test_ranks_whose_tensors_go_by_two_libraries_are_told_so() -> None:
    program = planned("f32[8@c]", "f32[8]", (LOW, LOW))
    with rank_of("cuda:nccl,cpu:gloo", 0, 2):
        digest, name = _identity(executable(program, 1), group_state(), torch.device("cpu"))
        group = GroupState(None, group_state().store)
        other = TorchWatch((0, 1), 1, name, digest, [], 20.0, group)
        seen: list[Exception] = []

        def come() -> None:
            try:
                other.begin("")
            except sp.ShardplanError as error:
                seen.append(error)

        thread = threading.Thread(target=come)
        thread.start()
        with pytest.raises(sp.BackendError) as caught:
            run_program(program, [[torch.empty(4, device="cuda")]], timeout=20.0)
        thread.join(60)
        group.end()
    assert re.fullmatch(
        r"the ranks \[0, 1\] do not run one program: rank 0 runs (program \w{8}) on cuda by nccl, rank 1 \1 on cpu by "
        r"gloo; nothing was sent",
        str(caught.value),
    )
    assert len(seen) == 1 and "rank 1 runs" in str(seen[0])


def test_a_line_says_where_no_collective_is_the_librarys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS["permute"][0]
    told = (
        "on cuda the process group has gloo: all collectives go as messages between two ranks, while prices on a "
        "topology are of its library's own; these run on gloo and nccl, on gloo where SHARDPLAN_NATIVE names it"
    )
    for said, way, lines in ((None, "gloo", [told]), (None, None, []), ("", None, []), ("gloo", "gloo", [])):
        _tell_once.cache_clear()
        monkeypatch.delenv("SHARDPLAN_NATIVE", raising=False)
        if said is not None:
            monkeypatch.setenv("SHARDPLAN_NATIVE", said)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                posted(program, way)
        assert [str(w.message) for w in caught if "process group has" in str(w.message)] == lines, (said, way)


def test_the_groups_of_members_are_of_the_library_that_was_chosen() -> None:
    with rank_of("cuda:nccl,cpu:gloo", 1, RANKS), _disable_current_modes():
        for way, libraries in ((None, {"cuda": "nccl", "cpu": "gloo"}), ("nccl", {"cuda": "nccl"})):
            group = dist.new_group(backend=way)
            state = GroupState(group, group_state().store, tuple(range(RANKS)))
            assert state.libraries == libraries
            assert libraries_of(state.members((3, 1))) == libraries
