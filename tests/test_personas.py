"""Five people in their first hour: what each types, and what is printed at 80 columns: `tests/personas/*.txt`.

A command stands behind `$ `, with further lines behind `> `; below it is what it prints, where `...` is anything. At
most six commands lead to the goal; files that a person writes are no commands. They run in an empty folder, so that
nothing but what is installed is found; `python -m tests.wheel` does the same with the wheel.
"""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "personas"
NAMES = ("infra", "rl", "student", "research", "jax")  # the last two have a framework
WIDTH = 80


def commands_of(text: str) -> list[tuple[str, str]]:
    """What is typed, and what is printed then."""
    parts = re.split(r"^\$ ", text, flags=re.M)[1:]
    found: list[tuple[str, str]] = []
    for part in parts:
        first, *lines = part.splitlines()
        more = [line for line in lines if line.startswith(">")]
        typed = "\n".join([first, *(line.removeprefix(">").removeprefix(" ") for line in more)])
        found.append((typed, "".join(f"{line}\n" for line in lines[len(more) :])))
    return found


def run_typed(typed: str, folder: Path, programs: Path) -> str:
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment = kept | {"PATH": path, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        ["bash", "-c", typed], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{typed}\n{done.stdout}{done.stderr}"
    return done.stdout


def spend_first_hour(name: str, folder: Path, programs: Path) -> None:
    """Type what a person types into an empty folder, with the commands of an environment's folder of programs."""
    told = commands_of((FOLDER / f"{name}.txt").read_text(encoding="utf-8"))
    assert 0 < sum(not typed.startswith(("cat >", "printf")) for typed, _ in told) <= 6
    for typed, expected in told:
        printed = run_typed(typed, folder, programs)
        same = doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)
        assert same, f"$ {typed}\nexpected:\n{expected}printed:\n{printed}"
        assert not [line for line in printed.splitlines() if len(line) > WIDTH], f"$ {typed}\n{printed}"


@pytest.mark.parametrize("name", NAMES)
def test_the_first_hour(name: str, tmp_path: Path) -> None:
    spend_first_hour(name, tmp_path, Path(sys.executable).parent)
