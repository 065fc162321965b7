"""Twelve movements: the programs by hand are what they are said to be, the page says what the result file does."""

import json
from dataclasses import replace

import pytest
from benchmarks.twelve_movements import MOVEMENTS, Movement, page_table, row_of
from tests.docs.test_first_page import ROOT

SLOWER = {"prefill to decode": 1.56}  # what docs/movements.md says of them, and why


@pytest.mark.parametrize("movement", MOVEMENTS, ids=lambda m: m.name)
def test_ours_is_no_worse_than_by_hand(movement: Movement) -> None:
    movement.check()
    row = row_of(movement)
    hand, ours = row["by_hand"][0], row["ours"]
    assert row["ours_over_hand"] <= SLOWER.get(movement.name, 1)
    if movement.name not in SLOWER:
        assert ours["level_bytes"][0] <= hand["level_bytes"][0]
        assert ours["worst_device_bytes"] <= 1.01 * hand["worst_device_bytes"]


def test_a_wrong_program_by_hand_is_refused() -> None:
    ulysses = next(m for m in MOVEMENTS if m.name == "Ulysses")
    (text,) = ulysses.by_hand.values()
    elsewhere = text.replace("dst_dim=1", "dst_dim=2").replace("64@sp, 128", "64, 128@sp")
    with pytest.raises(ValueError, match="other ends"):
        replace(ulysses, by_hand={"to heads": elsewhere}).check()
    uneven = next(m for m in MOVEMENTS if m.name == "uneven vocabulary")
    with pytest.raises(ValueError, match="other ends"):
        replace(uneven, by_hand=uneven.by_hand_later, by_hand_later={}).check()


def test_the_page_has_the_table_of_the_result_file() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "twelve_movements.json").read_text())["movements"]
    assert [row["movement"] for row in rows] == [movement.name for movement in MOVEMENTS]
    assert page_table(rows) in (ROOT / "docs" / "movements.md").read_text()
