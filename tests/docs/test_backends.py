"""What a backend must have is what the guide says, and what every backend has."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from shardplan.execution.run import BACKENDS, PACKAGES, Backend

ASKED = {name for name in vars(Backend) if not name.startswith("_")}
GUIDE = Path(__file__).parents[2] / "docs" / "extend.md"


def test_the_guide_says_what_is_asked_of_a_backend() -> None:
    assert {"run_program", "decline", "join_launch"} == ASKED
    text = GUIDE.read_text(encoding="utf-8")
    for name in ASKED:
        assert re.search(rf"^`{name}\(", text, re.MULTILINE), f"{name} has no paragraph"


@pytest.mark.parametrize("backend", sorted({*BACKENDS} - {"reference"}))
def test_every_backend_has_it(backend: str) -> None:
    pytest.importorskip(PACKAGES[backend])
    module = import_module(f"shardplan.execution.{backend}.run")
    assert all(callable(getattr(module, name)) for name in ASKED)
