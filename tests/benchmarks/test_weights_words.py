"""The page of weights has the table that the committed result makes, and every pair in it was equal."""

from benchmarks.common import ROOT
from benchmarks.results_page import result
from benchmarks.weights_words import WORDS, page_table


def test_the_page_of_weights_has_what_was_found() -> None:
    found = result("weights_words")
    assert found["pairs"] == found["equal"] == len(found["rows"])
    assert {(r["from"], r["to"]) for r in found["rows"]} == {(a, b) for a in WORDS for b in WORDS}
    page = (ROOT / "docs" / "weights.md").read_text()
    assert f"<!-- pairs -->\n\n{page_table(found)}\n<!-- end of pairs -->" in page
