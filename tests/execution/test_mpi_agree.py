"""What MPI ranks know of agreements, programs and ends, without MPI."""

import hashlib

import pytest

from shardplan.execution.agreement import RankFailed
from shardplan.execution.mpi.agreed_programs import AgreedProgram, AgreedPrograms, Parting, _name
from shardplan.execution.mpi.letters import Letters

ONE = hashlib.sha256(b"one").digest()


def test_who_has_ended_is_missed_where_it_has_not_come() -> None:
    letters = Letters()
    programs = AgreedPrograms(letters)
    ranks = (0, 1, 2, 3)
    first, second = (_name(ranks), 1), (_name(ranks), 2)
    letters._readers[Parting](2, Parting("ValueError: no", {_name(ranks): 1}, {first: 3}))
    why = "rank 2 ended: ValueError: no"
    for run in range(1, 6):
        agreed = AgreedProgram(first, ONE, run=run)
        assert programs.stop_reason(ranks, agreed) == (why if run > 3 else "")
        assert programs.stop_reason((0, 1, 3), agreed) == ""
    ended = {2: RankFailed("ended: ValueError: no")}
    assert programs._end_words(ranks, first) == {}  # it has agreed
    assert programs._end_words(ranks, second) == ended
    assert programs._end_words((0, 2), (_name((0, 2)), 1)) == ended  # of a set in which it has agreed on nothing


def test_an_end_says_how_far_the_rank_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))  # pyright: ignore[reportArgumentType]
    from mpi4py import MPI

    class World:
        Get_size = staticmethod(lambda: 3)
        Get_rank = staticmethod(lambda: 1)

    posted: list[tuple[int, object]] = []
    monkeypatch.setattr(MPI, "COMM_WORLD", World)
    monkeypatch.setattr(Letters, "post", lambda self, rank, letter: posted.append((rank, letter)))
    programs = AgreedPrograms(Letters())
    programs._begun[b"set"] = 2
    programs._made[b"set"] = [AgreedProgram((b"set", 2), ONE, run=7)]
    programs.announce_end(ValueError("no\nmore"))
    letter = Parting("ValueError: no", {b"set": 2}, {(b"set", 2): 7})
    assert posted == [(0, letter), (2, letter)]
