"""The checker reads protocols that others wrote: accepted, or rejected with a counter-example, as their fixes say."""

import pytest
from tests.fused.judge import TooManyStates, wrong
from tests.fused.public_protocols import IRIS, TOKENSPEED, PublicProtocol, fbgemm, public, staged

import shardplan as sp
from shardplan.fused.tiles.checker import check


@pytest.mark.parametrize("each", public(2) + public(4), ids=lambda each: f"{each.protocol.ranks} {each.says[:40]}")
def test_what_is_published_is_judged(each: PublicProtocol) -> None:
    if not each.wrong:
        check(each.protocol)
        return
    with pytest.raises(sp.ScheduleError, match=each.wrong) as error:
        check(each.protocol)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("address", [f"{IRIS}462", f"{IRIS}463", f"{TOKENSPEED}1356"])
def test_a_published_fix_is_rejected_before_and_accepted_after(address: str) -> None:
    assert [bool(each.wrong) for each in public(3) if each.address == address] == [True, False]


@pytest.mark.parametrize(
    ("protocol", "is_wrong"),
    [(staged(2, 1), True), (staged(2, 2), False), (staged(2, 1, done=True), False),
     (fbgemm(2, 1, barrier=True), True), (fbgemm(2, 1, barrier=True, second=True), False)],
)  # fmt: skip
def test_every_interleaving_agrees(protocol: sp.fused.TileProtocol, is_wrong: bool) -> None:
    try:
        assert bool(wrong(protocol, "resident", 60_000)) == is_wrong
    except TooManyStates:
        pytest.skip("too many states to try them all")
