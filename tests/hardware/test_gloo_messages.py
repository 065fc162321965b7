"""The messages of gloo's collectives: everybody gets what it must, from somebody who has it, in gloo's own pieces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.hardware.prices.gloo_messages import GLOO_MESSAGES, SEGMENT

SIZES = st.tuples(st.integers(2, 9), st.integers(1, 5000), st.sampled_from((1, 2, 4, 8)))


def received(kind: str, q: int, nbytes: int, width: int) -> list[int]:
    """The bytes that every member receives."""
    total = np.zeros(q, dtype=np.int64)
    for part in GLOO_MESSAGES[kind](q, nbytes, width):
        for one in part.rounds:
            assert (one[:, 0] != one[:, 1]).all() and (one[:, 2] > 0).all()
            assert (one[:, :2] >= 0).all() and (one[:, :2] < q).all()
            np.add.at(total, one[:, 1], one[:, 2])
    return total.tolist()


@given(SIZES)
def test_gathers_and_exchanges_move_no_byte_twice(sizes: tuple[int, int, int]) -> None:
    q, n, _ = sizes
    assert received("all_gather", q, n, 1) == [(q - 1) * n] * q
    assert received("all_to_all", q, n * q, 1) == [(q - 1) * n] * q


@given(SIZES)
def test_a_broadcast_passes_on_what_it_has(sizes: tuple[int, int, int]) -> None:
    q, n, _ = sizes
    (part,) = GLOO_MESSAGES["broadcast"](q, n, 1)
    assert part.in_flight == 1 and len(part.rounds) == (q - 1).bit_length()
    have = {0}
    for one in part.rounds:
        senders, receivers = set(one[:, 0].tolist()), set(one[:, 1].tolist())
        assert senders <= have and not receivers & have
        have |= receivers
    assert have == set(range(q)) and received("broadcast", q, n, 1) == [0, *[n] * (q - 1)]


@given(SIZES)
def test_a_ring_adds_every_element_up_once_and_spreads_it(sizes: tuple[int, int, int]) -> None:
    """Every segment passes q - 1 members, and then all others; a reduce_scatter is the same."""
    q, n, width = sizes
    total = n * width
    adds, spreads = GLOO_MESSAGES["all_reduce"](q, total, width)
    for part in (adds, spreads):
        assert sum(int(one[:, 2].sum()) for one in part.rounds) == (q - 1) * total
        assert all((one[:, 1] == (one[:, 0] - 1) % q).all() for one in part.rounds)
        assert part.in_flight == 2
    assert received("reduce_scatter", q, total, width) == received("all_reduce", q, total, width)


@pytest.mark.parametrize(("nbytes", "rounds"), [(8 * SEGMENT, 2), (8 * SEGMENT + 4, 3), (64, 2)])
def test_segments_of_a_ring(nbytes: int, rounds: int) -> None:
    """At least two a member, none above 1 MiB."""
    adds, _ = GLOO_MESSAGES["all_reduce"](4, nbytes, 4)
    assert len(adds.rounds) == 3 * rounds
    assert max(int(one[:, 2].max()) for one in adds.rounds) == -(-nbytes // (16 * rounds)) * 4


@given(SIZES)
def test_the_root_of_a_reduction_gets_the_sums_of_all(sizes: tuple[int, int, int]) -> None:
    q, n, width = sizes
    total = n * width
    adds, last = GLOO_MESSAGES["reduce"](q, total, width)
    (one,) = last.rounds
    assert (one[:, 1] == 0).all() and last.in_flight == 1
    kept = total - int(one[:, 2].sum())  # the root's own chunk
    assert 0 < kept <= total and (n < 2 * q or kept == int(adds.rounds[0][:, 2].max()) * 2)
    assert len(adds.rounds) >= 2 * (q - 1)
