"""The page of conversions has the table that the committed result makes, and every pair in it was equal."""

from benchmarks.common import ROOT
from benchmarks.results_page import result
from benchmarks.weights_words import WORDS, page_table


def test_the_page_of_conversions_is_what_was_found() -> None:
    found = result("weights_words")
    assert found["pairs"] == found["equal"] == len(found["rows"])
    assert {(r["from"], r["to"]) for r in found["rows"]} == {(a, b) for a in WORDS for b in WORDS}
    page = (ROOT / "docs" / "conversions.md").read_text()
    assert f"<!-- pairs -->\n\n{page_table(found)}\n<!-- end of pairs -->" in page
