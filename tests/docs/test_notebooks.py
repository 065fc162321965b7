"""What the notebooks of `examples/notebooks` say is what their cells say now."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from notebooks import code_cells, notebooks, outputs

ROUNDING = re.compile(r"\d\.\de-1\d")  # of sums, which machines differ in


def said(cell: list[dict[str, Any]]) -> list[str]:
    """What a cell says, as text."""
    found: list[str] = []
    for one in cell:
        text = one.get("text") or one.get("evalue") or one["data"]["text/plain"]
        found.append(ROUNDING.sub("0", "".join(text)))
    return found


def test_there_are_both_stories() -> None:
    assert [path.stem for path in notebooks()] == ["model_to_launch", "trainer_to_server"]


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_says_what_its_cells_do(path: Path) -> None:
    notebook = json.loads(path.read_text())
    cells = code_cells(notebook)
    assert cells and path.stat().st_size < 200_000
    for number, (cell, now) in enumerate(zip(cells, outputs(notebook), strict=True), 1):
        assert cell["execution_count"] == number
        assert said(cell["outputs"]) == said(now), "".join(cell["source"])
