"""How ranks agree, whatever carries their words: any number of ranks, any order of words, ranks that are lost."""

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.execution import agreement as agreements_module
from shardplan.execution.agreement import Agreement, RankFailed, RankReady, Refusal, Start, Word, Words, meet, silent

KINDS = pytest.mark.parametrize("make", [Agreement.in_tree, Agreement.among_all])
NO_RANK: frozenset[int] = frozenset()
Pair = tuple[int, int]  # sender, receiver


class Simulation:
    """All ranks but the absent come, in a random order, and some of them die; words travel in any order.

    A word to a rank that has not come waits for it; of two words between the same ranks the first arrives first.
    """

    def __init__(
        self,
        make,
        ranks: tuple[int, ...],
        seed: int,
        failing: frozenset[int] = NO_RANK,
        others: frozenset[int] = NO_RANK,
        absent: frozenset[int] = NO_RANK,
        dying: frozenset[int] = NO_RANK,
        told: bool = False,
    ) -> None:
        """Run to the end; `told` says whether those that live are told of those that are lost."""
        rng, self.sent = random.Random(seed), Counter[int]()
        self.agreements: dict[int, Agreement] = {}
        self.lost = absent | dying
        pending: dict[Pair, list[Word]] = {}
        ends = {rank: rng.randrange(4) for rank in dying}  # how many words it still hears

        def post(sender: int, words: Words) -> None:
            self.sent[sender] += len(words)
            for receiver, word in words:
                pending.setdefault((sender, receiver), []).append(word)

        coming = [rank for rank in ranks if rank not in absent]
        news = [(lost, rank) for rank in ranks for lost in sorted(self.lost) if told and rank not in self.lost]
        while True:
            ready = [pair for pair, words in pending.items() if words and pair[1] in self.agreements]
            heard = [pair for pair in news if pair[1] in self.agreements]
            if not (coming or ready or heard):
                return
            choice = rng.choice([*["come"] * bool(coming), *["word"] * bool(ready), *["news"] * bool(heard)])
            if choice == "come":
                rank = coming.pop(rng.randrange(len(coming)))
                own = (
                    RankFailed(f"failed {rank}") if rank in failing else RankReady("other" if rank in others else "one")
                )
                self.agreements[rank] = make(ranks, rank, own)
                post(rank, self.agreements[rank].open())
                continue
            sender, receiver = pair = rng.choice(ready if choice == "word" else heard)
            word: Word = RankFailed("ended")
            if choice == "word":
                word = pending[pair].pop(0)
            else:
                news.remove(pair)
            if receiver in dying:
                ends[receiver] -= 1
                if ends[receiver] < 0:
                    continue
            post(receiver, self.agreements[receiver].hear({sender: word}))
            assert self.agreements[receiver].hear({}) == [], "who polls says nothing twice"

    @property
    def live(self) -> dict[int, Agreement]:
        return {rank: a for rank, a in self.agreements.items() if rank not in self.lost}

    def named(self, rank: int) -> list[int]:
        """Whom a rank that waits names when its time is up."""
        return silent(rank, self.live[rank].waits_for, lambda r: self.live[r].waits_for if r in self.live else None)


@st.composite
def rank_sets(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(sorted(draw(st.sets(st.integers(0, 200), min_size=2, max_size=40))))


def some(data: st.DataObject, ranks: tuple[int, ...], most: int = 3) -> frozenset[int]:
    return frozenset(data.draw(st.sets(st.sampled_from(ranks), min_size=1, max_size=min(most, len(ranks) - 1))))


@KINDS
@given(ranks=rank_sets(), seed=st.integers(0, 2**32))
def test_ranks_that_come_with_the_same_start(make, ranks: tuple[int, ...], seed: int) -> None:
    ran = Simulation(make, ranks, seed)
    assert {a.verdict for a in ran.agreements.values()} == {Start()}
    if make is Agreement.in_tree:
        assert sum(ran.sent.values()) == 2 * (len(ranks) - 1)
        assert max(ran.sent.values()) <= 3


@KINDS
@given(ranks=rank_sets(), seed=st.integers(0, 2**32), data=st.data())
def test_a_failure_reaches_every_rank(make, ranks: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    failing = some(data, ranks)
    ran = Simulation(make, ranks, seed, failing)
    for agreement in ran.agreements.values():
        assert isinstance(agreement.verdict, Refusal) and agreement.waits_for == []
        assert agreement.verdict.failure in {f"{r} failed {r}" for r in failing}
    assert make is Agreement.among_all or max(ran.sent.values()) <= 3


@KINDS
@given(ranks=rank_sets(), seed=st.integers(0, 2**32), data=st.data())
def test_unlike_offers_never_start(make, ranks: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    others = some(data, ranks, 200)
    ran = Simulation(make, ranks, seed, others=others)
    for agreement in ran.agreements.values():
        assert isinstance(agreement.verdict, Refusal)
        assert {*agreement.verdict.offers.values()} == {"one", "other"}
        assert all((offer == "other") == (rank in others) for rank, offer in agreement.verdict.offers.items())
    assert make is Agreement.among_all or max(ran.sent.values()) <= 3


@KINDS
@given(ranks=rank_sets(), seed=st.integers(0, 2**32), data=st.data())
def test_who_lives_comes_to_one_verdict_or_names_the_lost(
    make, ranks: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    lost = some(data, ranks)
    absent = frozenset(rank for rank in lost if data.draw(st.booleans()))
    failing = some(data, ranks) - lost if data.draw(st.booleans()) else NO_RANK
    ran = Simulation(make, ranks, seed, failing, absent=absent, dying=lost - absent)
    verdicts = {type(a.verdict) for a in ran.live.values()}
    assert not {Start, Refusal} <= verdicts
    assert Start not in verdicts or not (absent or failing)
    for rank, agreement in ran.live.items():
        if agreement.verdict is None:
            named = ran.named(rank)
            assert named and {*named} <= lost
        elif isinstance(agreement.verdict, Refusal):
            assert agreement.verdict.failure in {f"{r} failed {r}" for r in failing}


@KINDS
@given(ranks=rank_sets(), seed=st.integers(0, 2**32), data=st.data())
def test_who_is_told_of_the_lost_waits_for_nobody(make, ranks: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    absent = some(data, ranks)
    ran = Simulation(make, ranks, seed, absent=absent, told=True)
    for agreement in ran.live.values():
        assert isinstance(agreement.verdict, Refusal)
        assert agreement.verdict.failure in {f"{r} ended" for r in absent}


def test_another_offer_is_refused_where_it_is_heard() -> None:
    """By the parent of the odd rank, which tells its own parent and children; not only when the root hears of it."""
    middle = Agreement.in_tree((0, 1, 2, 3, 4), 1, RankReady("one"))
    middle.open()
    said = middle.hear({3: RankReady("other")})
    assert [receiver for receiver, _ in said] == [0, 3, 4] and {word for _, word in said} == {middle.verdict}
    assert middle.verdict == Refusal(((1, RankReady("one")), (3, RankReady("other"))))
    assert middle.hear({4: RankReady("one")}) == []


@pytest.mark.parametrize("count", [4, 16, 64, 1024])
def test_what_a_rank_of_a_tree_sends_does_not_grow_with_the_ranks(count: int) -> None:
    ran = Simulation(Agreement.in_tree, tuple(range(count)), 0)
    assert max(ran.sent.values()) == (2 if count == 4 else 3)
    assert sum(ran.sent.values()) == 2 * (count - 1)


def test_who_is_waited_for() -> None:
    ranks = (3, 5, 8, 9)
    root, leaf = (Agreement.in_tree(ranks, rank, RankReady("one")) for rank in (3, 9))
    assert root.open() == []
    assert (root.waits_for, leaf.waits_for) == ([5, 8], [5])
    leaf.open()
    assert leaf.waits_for == [5]


def test_those_who_wait_are_followed_to_those_who_are_silent() -> None:
    assert silent(0, [1], {1: [2], 3: [0]}.get) == [2]
    assert silent(0, [1, 4], {1: [2, 0], 2: [3], 3: [1], 4: [5]}.get) == [5]
    assert silent(0, [1, 2], {1: [0], 2: []}.get) == [1, 2]


class Slow:
    """A mail from which words come one after another, each after some seconds, on a clock of its own."""

    def __init__(self, words: list[tuple[float, Mapping[int, Word]]]) -> None:
        self.words, self.now, self.log = words, 0.0, list[str]()

    def post(self, words: Words) -> None:
        self.log += [f"post {rank}" for rank, _ in words]

    def collect(self, seconds: float) -> Mapping[int, Word]:
        if not self.words or self.words[0][0] > seconds:
            self.now += seconds
            return {}
        after, word = self.words.pop(0)
        self.now += after
        return word

    def close(self) -> None:
        self.log.append("close")


@pytest.mark.parametrize(
    ("third", "verdict", "late"), [(2.0, Start(), []), (3.5, None, [2])], ids=["in time", "too late"]
)
def test_a_meeting_has_a_bound_for_all_words_together(monkeypatch, third: float, verdict, late: list[int]) -> None:
    own = RankReady("one")
    mail, agreement = Slow([(2.0, {1: own}), (third, {2: own})]), Agreement.among_all((0, 1, 2), 0, own)
    monkeypatch.setattr(agreements_module.time, "monotonic", lambda: mail.now)
    meet(agreement, mail, 5.0)
    assert (agreement.verdict, agreement.waits_for) == (verdict, late)
    assert mail.log == ["post 1", "post 2", "close"]
