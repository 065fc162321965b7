"""How ranks agree, without MPI: any number of ranks, words that arrive in any order, and what each rank sends."""

import hashlib
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.execution.mpi.agree import Agreement, Refusal, Runs, Start, program_name
from shardplan.execution.mpi.agreed_programs import AgreedProgram, AgreedPrograms, Parting, _name
from shardplan.execution.mpi.faults import silent
from shardplan.execution.mpi.mail import Mail

ONE, OTHER = (hashlib.sha256(text).digest() for text in (b"one", b"other"))


def meet(
    ranks: tuple[int, ...], seed: int, refusing: dict[int, str], others: frozenset[int] = frozenset()
) -> tuple[dict[int, Agreement], Counter[int]]:
    """All ranks come, in a random order; return their agreements, and how many words each has sent.

    A word to a rank that has not come waits for it; of two words between the same ranks the first arrives first.
    """
    rng, sent = random.Random(seed), Counter[int]()
    agreements: dict[int, Agreement] = {}
    pending: dict[tuple[int, int], list] = {}

    def post(sender: int, words) -> None:
        sent[sender] += len(words)
        for receiver, word in words:
            pending.setdefault((sender, receiver), []).append(word)

    coming = list(ranks)
    while True:
        ready = [pair for pair, words in pending.items() if words and pair[1] in agreements]
        if not coming and not ready:
            return agreements, sent
        if coming and (not ready or rng.random() < 0.5):
            rank = coming.pop(rng.randrange(len(coming)))
            agreement = agreements[rank] = Agreement(ranks, rank, OTHER if rank in others else ONE)
            post(rank, agreement.refuse(refusing[rank]) if rank in refusing else agreement.open())
        else:
            pair = rng.choice(ready)
            post(pair[1], agreements[pair[1]].hear(pair[0], pending[pair].pop(0)))


@st.composite
def rank_sets(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(sorted(draw(st.sets(st.integers(0, 200), min_size=2, max_size=70))))


@given(rank_sets(), st.integers(0, 2**32))
def test_ranks_of_one_program_start(ranks: tuple[int, ...], seed: int) -> None:
    agreements, sent = meet(ranks, seed, {})
    assert {a.verdict for a in agreements.values()} == {Start()}
    assert sum(sent.values()) == 2 * (len(ranks) - 1)
    assert max(sent.values()) <= 3


@given(rank_sets(), st.integers(0, 2**32), st.data())
def test_a_refusal_reaches_every_rank(ranks: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    refusing = data.draw(st.sets(st.sampled_from(ranks), min_size=1, max_size=3))
    agreements, sent = meet(ranks, seed, {r: f"rank {r}" for r in refusing})
    for rank, agreement in agreements.items():
        assert isinstance(agreement.verdict, Refusal)
        assert agreement.waits_for == []
        assert agreement.verdict.why in ({f"rank {rank}"} if rank in refusing else {f"rank {r}" for r in refusing})
    assert max(sent.values()) <= 3


@given(rank_sets(), st.integers(0, 2**32), st.data())
def test_two_programs_never_start(ranks: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    others = frozenset(data.draw(st.sets(st.sampled_from(ranks), min_size=1, max_size=len(ranks) - 1)))
    agreements, sent = meet(ranks, seed, {}, others)
    for agreement in agreements.values():
        assert isinstance(agreement.verdict, Refusal)
        assert program_name(ONE) in agreement.verdict.why
        assert program_name(OTHER) in agreement.verdict.why
    assert max(sent.values()) <= 3


def test_another_program_is_refused_where_it_is_heard() -> None:
    """By the parent of the odd rank, which tells its own parent and children; not only when the root hears of it."""
    middle = Agreement((0, 1, 2, 3, 4), 1, ONE)
    middle.open()
    said = middle.hear(3, Runs(OTHER))
    assert [receiver for receiver, _ in said] == [0, 3, 4] and {word for _, word in said} == {middle.verdict}
    assert isinstance(middle.verdict, Refusal) and "rank 1 runs" in middle.verdict.why
    assert middle.hear(4, Runs(ONE)) == []


@pytest.mark.parametrize("count", [4, 16, 64, 1024])
def test_what_a_rank_sends_does_not_grow_with_the_ranks(count: int) -> None:
    _, sent = meet(tuple(range(count)), 0, {})
    assert max(sent.values()) == (2 if count == 4 else 3)
    assert sum(sent.values()) == 2 * (count - 1)


def test_who_is_waited_for() -> None:
    root, leaf = Agreement((3, 5, 8, 9), 3, ONE), Agreement((3, 5, 8, 9), 9, ONE)
    assert root.open() == []
    assert (root.waits_for, leaf.waits_for) == ([5, 8], [5])
    leaf.open()
    assert leaf.waits_for == [5]


def test_the_roll_call_follows_those_who_wait_to_those_who_are_silent() -> None:
    assert silent(0, [1], {1: [2], 3: [0]}) == [2]
    assert silent(0, [1, 4], {1: [2, 0], 2: [3], 3: [1], 4: [5]}) == [5]
    assert silent(0, [1, 2], {1: [0], 2: []}) == [1, 2]


def test_who_has_ended_is_missed_where_it_has_not_come() -> None:
    letters = Mail()
    programs = AgreedPrograms(letters)
    ranks = (0, 1, 2, 3)
    first, second = (_name(ranks), 1), (_name(ranks), 2)
    letters._readers[Parting](2, Parting("ValueError: no", {_name(ranks): 1}, {first: 3}))
    why = "rank 2 ended: ValueError: no"
    for run in range(1, 6):
        agreed = AgreedProgram(first, ONE, run=run)
        assert programs.stop_reason(ranks, agreed) == (why if run > 3 else "")
        assert programs.stop_reason((0, 1, 3), agreed) == ""
    assert programs._end_reason(ranks, first) == ""  # it has agreed
    assert programs._end_reason(ranks, second) == why
    assert programs._end_reason((0, 2), (_name((0, 2)), 1)) == why  # of a set in which it has agreed on nothing


def test_an_end_says_how_far_the_rank_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))  # pyright: ignore[reportArgumentType]
    from mpi4py import MPI

    class World:
        Get_size = staticmethod(lambda: 3)
        Get_rank = staticmethod(lambda: 1)

    posted: list[tuple[int, object]] = []
    monkeypatch.setattr(MPI, "COMM_WORLD", World)
    monkeypatch.setattr(Mail, "post", lambda self, rank, letter: posted.append((rank, letter)))
    programs = AgreedPrograms(Mail())
    programs._begun[b"set"] = 2
    programs._made[b"set"] = [AgreedProgram((b"set", 2), ONE, run=7)]
    programs.announce_end(ValueError("no\nmore"))
    letter = Parting("ValueError: no", {b"set": 2}, {(b"set", 2): 7})
    assert posted == [(0, letter), (2, letter)]
