"""`docs/index.md` names everything that a user may type, and leads to every page; the README and the pages stay few."""

import re
from pathlib import Path

import pytest
from tests.docs.test_links import LINK
from typer.main import get_command

import shardplan
from shardplan.cli import app
from shardplan.core.ops import OPS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = (DOCS / "index.md").read_text().partition("\n## Index\n")[2]
ROW = re.compile(r"^\| `(sp\.|shardplan )(\w+)` \| ([^|]+) \| \[[\w.-]+\]\(([^)]+)\) \|$", re.M)


def named(prefix: str) -> list[str]:
    return [name for before, name, _, _ in ROW.findall(INDEX) if before == prefix]


def test_every_name_stands_on_the_first_page_once() -> None:
    assert sorted(named("sp.")) == sorted(shardplan.__all__)


def test_every_command_stands_on_the_first_page_once() -> None:
    assert sorted(named("shardplan ")) == sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "page"), [(name, page.partition("#")[0]) for _, name, _, page in ROW.findall(INDEX)])
def test_the_page_that_the_first_page_names_knows_it(name: str, page: str) -> None:
    assert re.search(rf"\b{name}\b", (DOCS / page).read_text())


def test_every_page_is_linked_from_the_first_page() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall(INDEX)}
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= linked
    assert "docs/index.md" in LINK.findall((ROOT / "README.md").read_text())


def test_there_are_few_pages_and_a_short_readme() -> None:
    assert len([*DOCS.rglob("*.md")]) <= 21
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_the_glossary_is_in_order_and_says_where_each_word_is_from() -> None:
    rows = [
        line.strip("| ").split(" | ") for line in (DOCS / "glossary.md").read_text().splitlines() if line[:2] == "| "
    ]
    words = [row[0].lower() for row in rows[1:]]
    assert words == sorted(set(words))
    assert [row for row in rows if len(row) != 3 or not all(row)] == []
    assert {"axis", "dim", "mesh", "layout", "type", "certificate", "placement", "schedule", *names_of_moves()} <= {
        *words
    }


def names_of_moves() -> set[str]:
    files = ("movement", "reduction", "general")
    return {name for name, op in OPS.items() if op.__module__ in {f"shardplan.core.ops.{file}" for file in files}}
