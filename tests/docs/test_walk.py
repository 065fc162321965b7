"""`docs/walk.md` names functions in the order in which they are called; `examples/walk.py` says what is called."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from execution.torch_launch import launch

ROOT = Path(__file__).parents[2]
WALK = [sys.executable, str(ROOT / "examples" / "walk.py")]
PAGE = (ROOT / "docs" / "walk.md").read_text()
STOP = re.compile(r"^\| (\d+) \| `([\w/.]+)` \| `([\w.]+)` \|", re.MULTILINE)

pytest.importorskip("torch")


def stops(part: str) -> list[str]:
    """The stops of a part of the page, as `examples/walk.py` prints them."""
    return [f"{path} {name}" for _, path, name in STOP.findall(PAGE.partition(f"## {part}")[2].partition("\n## ")[0])]


def walked(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def walked_on(count: int, *arguments: str) -> list[str]:
    """The walk on so many ranks, of which the first prints."""
    status, out, err = launch(count, Path(WALK[1]), *arguments)
    assert status == 0, err
    return out.splitlines()


def test_the_walk(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    source, destination = "i32[6@(data,tensor), 6]", "i32[6, 6@tensor]"
    options = ["--mesh", "data=2,tensor=3", "--out", plan]
    search = ["gpt2", "--on", "dgx-a100", "--nodes", "1", "--batch", "32", "--top", "1"]
    parts = {
        "Planning": walked([*WALK, "redistribute", source, destination, *options]),
        "Running": walked_on(6, "run", plan, "--backend", "torch"),
        "Searching": walked([*WALK, "plan", *search]),
        "Training": walked_on(4, str(ROOT / "examples" / "job.py")),
    }
    numbers = [int(number) for number, _, _ in STOP.findall(PAGE)]
    assert numbers == list(range(1, len(numbers) + 1))
    for part, called in parts.items():
        named = stops(part)
        assert len(named) > 15
        assert [stop for stop in named if stop not in called] == []
        assert named == sorted(named, key=called.index), part
