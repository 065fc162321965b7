"""A rank that raises in a call that all ranks make: the others hear it at once, and why, and go on together."""

import re
from pathlib import Path

import pytest

import shardplan as sp
from execution.cuda_stand_in import rank_of
from execution.torch_launch import printed
from rank_threads import in_threads

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes

from shardplan.execution.torch import faults
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.group_state import GroupState, group_state
from shardplan.interop.torch import moves, redistribute, redistribute_state

ODD = 2
LIMIT = r"Infeasible: redistribute .* within 1 bytes a device.*"
WHY = {  # by case: what rank 2 raises, and what the others call what did not start
    "shards, new": (r"LayoutError: shards is 5; legal is a list of .*", r"program \w{8}"),
    "shards, known": (r"LayoutError: shards is 5; legal is a list of .*", r"program \w{8}"),
    "seconds, new": (r"BackendError: timeout=-1; legal is a positive number of seconds", r"program \w{8}"),
    "limit, new": (LIMIT, r"program \w{8}"),
    "limit, known": (LIMIT, r"program \w{8}"),
    "placements": (r"LayoutError: .*Shard\(dim=7\).*", r"program \w{8}"),
}


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """What each rank of `torch_refusal_child.py` was told, by case."""
    return printed(4, Path(__file__).with_name("torch_refusal_child.py"), seconds=280)


@pytest.mark.parametrize("case", WHY)
def test_what_one_rank_raises_is_told_to_all(case: str, told: dict[str, list[str]]) -> None:
    own, what = WHY[case]
    raised = told[case][ODD]
    assert re.fullmatch(own, raised), raised
    for rank, line in enumerate(told[case]):
        if rank != ODD:
            expected = rf"BackendError: {what} did not start: rank 2 raised {re.escape(raised)}; rank 2 sent nothing"
            assert re.fullmatch(expected, line), line


def test_a_wrong_state_of_one_rank_is_told_where_all_join(told: dict[str, list[str]]) -> None:
    own = "donate=True empties the state on the way, a Other; legal is a dict"
    assert told["state"] == [f"LayoutError: {own}" if r == ODD else f"LayoutError: rank 2: {own}" for r in range(4)]


def test_what_all_ranks_raise_each_raises_itself(told: dict[str, list[str]]) -> None:
    for line in told["limit, all"]:
        assert re.fullmatch(LIMIT, line), line


def test_those_that_agree_are_told_and_counted_so_that_nobody_is_waited_for() -> None:
    store, ranks, found = dist.HashStore(), (0, 1, 2, 3), {}

    def one(rank: int) -> None:
        state = GroupState(None, store)
        watch = TorchWatch(ranks, rank, "program aaaaaaaa", "a" * 64, ["op"], 60.0, state)
        try:
            if rank == ODD:
                watch.withdraw(sp.Infeasible("no plan\nwithin 1 byte"), None)  # pyright: ignore[reportArgumentType]
            else:
                watch.begin("")
        except sp.ShardplanError as error:
            found[rank] = f"{type(error).__name__}: {error}"
        finally:
            state.end()

    in_threads(ranks, one, 120)
    told = "BackendError: program aaaaaaaa did not start: rank 2 raised Infeasible: no plan; rank 2 sent nothing"
    assert found == {r: told for r in ranks if r != ODD}
    key = TorchWatch(ranks, 0, "", "a" * 64, [], 1.0, GroupState(None, store))._key("left")
    assert store.add(key, 0) == len(ranks)


class Strange:
    """A shard that is no array after all."""

    shape = (2, 4)

    def __array__(self, *_: object, **__: object) -> None:
        raise RuntimeError("no array")


def raised_in(case: str) -> None:
    """What rank 2 of four does wrong."""
    program = sp.redistribute("i32[8@x, 4]", "i32[8, 4]", mesh=sp.Mesh(x=4)).program
    mesh = DeviceMesh("cpu", [0, 1, 2, 3], _init_backend=False)
    whole = torch.Size((8, 4))
    x = DTensor.from_local(torch.empty(2, 4), mesh, [Shard(0)], run_check=False, shape=whole, stride=(4, 1))
    moves._moves.clear()
    match case:
        case "shards":
            sp.run(program, 5, "torch")
        case "seconds":
            sp.run(program, [torch.empty(2, 4)], "torch", 0)
        case "no array":
            sp.run(program, [Strange()], "torch")
        case "placements":
            redistribute(x, [Shard(7)])
        case "limit":
            redistribute(x, [Replicate()], memory_limit=1)


@pytest.mark.parametrize("case", ["shards", "seconds", "no array", "placements", "limit"])
def test_what_a_rank_raises_is_in_the_store(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "PATIENCE", 0.0)  # nobody comes who could be let go
    with rank_of("gloo", ODD, 4), _disable_current_modes():
        with pytest.raises(Exception) as caught:
            raised_in(case)
        key = f"shardplan/{faults._key_of((0, 1, 2, 3))}/1/verdict"
        assert group_state().store.check([key])
        found = group_state().store.get(key).decode()
    moves._moves.clear()
    assert found == f"withdrew 2 {type(caught.value).__name__}: {caught.value}"


def test_a_state_that_is_no_dict_is_refused() -> None:
    with rank_of("gloo", 0, 1), _disable_current_modes():
        with pytest.raises(sp.LayoutError, match=r"donate=True empties .*, a tuple; legal is a dict"):
            redistribute_state((), {}, donate=True)  # pyright: ignore[reportArgumentType]
        with pytest.raises(sp.LayoutError, match=r"^redistribute_state takes a mapping of names .*, not a tuple$"):
            redistribute_state((), {})  # pyright: ignore[reportArgumentType]
