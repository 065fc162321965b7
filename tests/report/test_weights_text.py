"""What `derive` prints, by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardplan.report.weights import derived_text


@pytest.mark.parametrize(("degrees", "end"), [((), "--to mine.toml"), ((("tensor", 2),), "--to mine.toml,tensor=2")])
def test_what_is_typed_next_has_a_degree_where_the_table_has_one(
    degrees: tuple[tuple[str, int], ...], end: str
) -> None:
    memory: Any = SimpleNamespace(degrees=degrees, parameters=(1, 2))
    disk: Any = SimpleNamespace(name="mine-disk")
    found = SimpleNamespace(memory=memory, disk=disk, ranks=(1, 2), elements=7, loader="load_weights", seconds=1.0)
    told = " ".join(derived_text(found, {Path("mine.toml"): memory, Path("mine-disk.toml"): disk}).split())
    assert told.endswith(f"next shardplan convert FOLDER OUT --from mine-disk.toml {end}")
    assert "2 trials, on 1 and 2 rank(s)" in told and "7 elements at sizes of no trial: equal" in told
