"""Agreement costs the store a constant, later runs nothing; a wrong shard or order is one error on every rank."""

import json
import re
from pathlib import Path

import pytest

import shardplan as sp
from execution.stores import Counting
from execution.torch_launch import launch, printed
from rank_threads import in_threads

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from shardplan.execution.torch.faults import TorchWatch  # noqa: E402
from shardplan.execution.torch.group_state import GroupState  # noqa: E402

HERE = Path(__file__).parent
MOST = 7  # operations of a rank at the first run of a program
X, Y = "a" * 64, "b" * 64


class Rank:
    """One rank of a set, with its own view of a common store."""

    def __init__(self, store, ranks, rank):
        self.store = Counting(store)
        self.site = GroupState(None, self.store)
        self.ranks, self.rank = ranks, rank

    def begin(self, digest, problem="", timeout=120.0):
        """The real agreement; what it raises."""
        try:
            TorchWatch(self.ranks, self.rank, f"program {digest[:8]}", digest, ["op"], timeout, self.site).begin(
                problem
            )
        except sp.ShardplanError as error:
            return error
        return None


def together(calls):
    """Call all at once, each in a thread; what they return."""
    return list(in_threads(range(len(calls)), lambda k: calls[k](), 300).values())


@pytest.fixture
def ranks_of():
    """Make ranks; their threads end with the test."""
    made = []

    def make(n):
        store, ranks = dist.HashStore(), tuple(range(n))
        made.extend(here := [Rank(store, ranks, r) for r in ranks])
        return here

    yield make
    for rank in made:
        rank.site.end()


def test_operations_on_the_store_do_not_grow_with_the_ranks(ranks_of) -> None:
    most = {}
    for n in (4, 16, 64):
        ranks, counts = ranks_of(n), []
        for digest in (X, X, Y, Y, X):
            for rank in ranks:
                rank.store.calls.clear()
            assert together([lambda r=r, d=digest: r.begin(d) for r in ranks]) == [None] * n
            counts.append(max(rank.store.calls.total() for rank in ranks))
        most[n] = counts
    assert most[4] == most[16] == most[64]
    assert 0 < most[4][0] <= MOST
    assert 0 < most[4][2] <= MOST
    assert most[4][1] == most[4][3] == most[4][4] == 0


def test_the_store_keeps_no_agreement_but_the_last(ranks_of) -> None:
    ranks = ranks_of(4)
    sizes = []
    for k in range(6):
        together([lambda r=r, k=k: r.begin(f"{k:064x}") for r in ranks])
        sizes.append(ranks[0].site.store.num_keys())
    assert len(set(sizes)) == 1


def test_who_runs_what(ranks_of) -> None:
    ranks = ranks_of(4)
    found = together([lambda r=r: r.begin(Y if r.rank == 2 else X) for r in ranks])
    for rank, error in zip(ranks, found, strict=True):
        assert type(error) is sp.BackendError
        own, who, other = ("bbbbbbbb", r"ranks \[0, 1, 3\]", "aaaaaaaa") if rank.rank == 2 else (
            "aaaaaaaa", "rank 2", "bbbbbbbb")  # fmt: skip
        assert re.fullmatch(
            rf"the ranks \[0, 1, 2, 3\] do not run one program: rank {rank.rank} runs program {own}, {who} program "
            rf"{other}; nothing was sent",
            str(error),
        ), error


def test_who_is_absent(ranks_of) -> None:
    ranks = ranks_of(5)
    found = together([lambda r=r: r.begin(X, timeout=2.0) for r in ranks if r.rank not in (1, 3)])
    assert {type(error) for error in found} == {sp.TimedOut}
    assert {str(error) for error in found} == {
        "program aaaaaaaa did not start: ranks [1, 3] of [0, 1, 2, 3, 4] did not arrive within 2 s"
    }


def test_a_refusal_is_the_same_line_on_every_rank_and_the_next_run_agrees(ranks_of) -> None:
    ranks = ranks_of(4)
    found = together([lambda r=r: r.begin(X, "input %0, rank 1: wrong" if r.rank == 1 else "") for r in ranks])
    assert {type(error) for error in found} == {sp.LayoutError}
    assert {str(error) for error in found} == {"program aaaaaaaa: input %0, rank 1: wrong; nothing was sent"}
    assert together([lambda r=r: r.begin(X) for r in ranks]) == [None] * 4


def test_tags_differ_by_run_and_by_program() -> None:
    site = GroupState(None, dist.HashStore())
    tags = [TorchWatch((0, 1), 0, "", digest, [], 1.0, site).tag for _ in range(500) for digest in (X, Y)]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < 2**31 for tag in tags)
    other = GroupState(None, dist.HashStore())
    swapped = [TorchWatch((0, 1), 1, "", digest, [], 1.0, other).tag for _ in range(500) for digest in (Y, X)]
    assert not {k for k, (a, b) in enumerate(zip(tags, swapped, strict=True)) if a == b}


WRONG = {
    "first call": r"of dtype torch\.float64 and shape \(4, 8\), but f32\[16@a, 8\] needs torch\.float32 and \(4, 8\)",
    "shape": r"of dtype torch\.float32 and shape \(2, 8\), but .*",
    "dtype": r"of dtype torch\.float64 and shape \(4, 8\), but .*",
    "ndim": r"of dtype torch\.float32 and shape \(32,\), but .*",
    "storage": r"that reaches byte 128 of a storage of 64 bytes; legal is one within its storage",
    "layout": r"of layout torch\.sparse_coo on cpu; legal is torch\.strided in the memory of one device for all inputs",
    "meta": r"of layout torch\.strided on meta; legal is torch\.strided in the memory of one device for all inputs",
    "drop-in, first call": r"of dtype torch\.float32 and shape \(1, 8\), but \(Shard\(dim=0\),\) of \(16, 8\) needs .*"
    r" and \(4, 8\)",
    "drop-in": r"that reaches byte 128 of a storage of 64 bytes; legal is one within its storage",
}


@pytest.fixture(scope="module")
def told():
    """What the four ranks of `torch_agree_child.py` saw, on one process group."""
    return printed(4, HERE / "torch_agree_child.py", seconds=900)


def test_real_ranks_ask_the_store_at_the_first_call_only(told) -> None:
    for rank in told:
        first, second, other, again, drop_in = rank["operations"]
        assert 0 < first <= MOST
        assert 0 < other <= MOST
        assert second == again == drop_in == 0


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_shard_is_refused_on_every_rank(told, case: str) -> None:
    seen = [rank["found"][case] for rank in told]
    assert {s["kind"] for s in seen} == {"LayoutError"}
    assert len({s["text"] for s in seen}) == 1
    end = "nothing was sent" if "first" in case else "rank 2 sent nothing"
    assert re.fullmatch(rf"program \w{{8}}: input %0, rank 2: a shard {WRONG[case]}; {end}", seen[0]["text"]), seen
    assert max(s["seconds"] for s in seen) < 30  # of a timeout of 120; about 0.7 on a machine that is not loaded


def test_a_rank_that_raises_and_lives_releases_the_others(told) -> None:
    seen = [rank["found"]["raises and lives"] for rank in told]
    assert seen[2]["kind"] == "MemoryError"
    for s in (seen[0], seen[1], seen[3]):
        assert s["kind"] == "BackendError"
        assert re.fullmatch(r"program \w{8}, step 0 \(all_to_all.*\): rank 2 failed: MemoryError: no room", s["text"])
    assert max(s["seconds"] for s in seen) < 30


def test_another_order_is_an_error_on_every_rank_and_no_wrong_data(told) -> None:
    _in_another_order([rank["found"]["another order"] for rank in told])


def test_another_order_without_tags() -> None:
    """As on nccl: headers differ before any data moves."""
    status, out, err = launch(4, HERE / "torch_agree_child.py", "batched", seconds=900)
    assert status == 0, err[-4000:]
    rows = [json.loads(line) for line in re.findall(r"RANK (\{.*?\})", out)]
    _in_another_order(sorted(rows, key=lambda row: row["rank"]))


def _in_another_order(seen) -> None:
    assert len(seen) == 4
    assert {s["kind"] for s in seen} == {"TimedOut"}
    for rank, s in enumerate(seen):
        who = r"ranks \[0, 1, 3\]" if rank == 2 else "rank 2"
        assert re.fullmatch(
            rf"program (\w{{8}}), step 0 \(all_to_all.*\): {who} of \[0, 1, 2, 3\] came to program (?!\1)\w{{8}} in "
            r"its place; legal is one order of programs on all ranks",
            s["text"],
        ), s
    assert max(s["seconds"] for s in seen) < 50  # the timeout is 60
