"""The page of results is what the committed result files say, and the test notices where it is not."""

import copy
import re

import pytest

from benchmarks import results_page


def test_the_page_is_current() -> None:
    text = results_page.PAGE.read_text()
    assert results_page.tables_marked(text) == list(results_page.TABLES)
    assert results_page.written(text) == text
    assert results_page.missing_figures(text) == []


def test_another_result_makes_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text, plain = results_page.PAGE.read_text(), results_page.result
    changed = {name: copy.deepcopy(plain(name)) for name in ("search_405b", "time_agreement")}
    changed["search_405b"]["priced"] += 1
    changed["time_agreement"]["agreement"][0]["within 5 %"] -= 0.02
    monkeypatch.setattr(results_page, "result", lambda name: changed.get(name) or plain(name))
    before, after = ({*page.splitlines()} for page in (text, results_page.written(text)))
    assert {line.split("|")[1].strip() for line in after - before} == {"priced behind the floors"}
    (phrase,) = results_page.missing_figures(text)
    found = 100 * changed["time_agreement"]["agreement"][0]["within 5 %"]
    assert phrase.startswith(f"closed within 5 % of ops on {found:.1f} %")


def test_figures_are_rounded_once() -> None:
    assert [results_page.short(x) for x in (98_734, 6.794, 0.3112, 20.3, 0.0)] == ["99,000", "6.8", "0.31", "20", "0"]
    assert [results_page.percent(x) for x in (9.94, 9.96, 0.155)] == ["9.9 %", "10 %", "0.2 %"]


def test_every_benchmark_and_every_result_is_in_the_table() -> None:
    table = (results_page.ROOT / "benchmarks" / "README.md").read_text()
    modules = {p.stem for p in (results_page.ROOT / "benchmarks").glob("*.py") if "\ndef main(" in p.read_text()}
    assert {m for m in modules if not re.search(rf"benchmarks\.{m}\b", table)} == set()
    assert {p.name for p in results_page.RESULTS.glob("*.json") if f"{p.name}`" not in table} == set()
