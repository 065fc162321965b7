"""The examples in README.md, CONTRIBUTING.md and docs/ run, and print what the page says.

A page is one session: its `python` blocks share their names, in order. A block with `>>>` is checked as a doctest, any
other is executed. In a `console` block each line `$ shardplan ...` runs and prints the lines below it, where there are
any, none wider than 80 columns; `...` stands for anything. A block after a line `<!-- not run: REASON -->` is not run.
"""

import doctest
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?P<skip><!-- not run: .+ -->\n+)?^```(?P<kind>python|console)\n(?P<text>.*?)^```$", re.M | re.S)
WIDTH = 80  # of a terminal, and of what is printed on it, objects apart
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """One fenced example of a page."""

    kind: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    return [
        Block(match["kind"], match["text"], page.count("\n", 0, match.start("text")))
        for match in BLOCK.finditer(page)
        if not match["skip"]
    ]


def run_page(page: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every example of a page in `folder`, and fail on the first that does not do what it shows."""
    monkeypatch.chdir(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.kind == "console":
            run_console(block)
        elif ">>>" in block.text:
            test = doctest.DocTestParser().get_doctest(block.text, names, name, name, block.line)
            said: list[str] = []
            failed = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append, clear_globs=False).failed
            names.update(test.globs)
            assert not failed, "".join(said)
        else:
            exec(compile("\n" * block.line + block.text, name, "exec"), names)


def run_console(block: Block) -> None:
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        typed, expected = re.fullmatch(r"((?:.*\\\n)*.*)\n?((?s:.*))", part).groups()  # type: ignore[union-attr]
        command = typed.replace("\\\n", " ")
        words = shlex.split(command, comments=True)
        if not words or words[0] != "shardplan":
            continue
        code = "import sys; from shardplan.cli import main; sys.argv[0] = 'shardplan'; main()"
        environment = os.environ | {"COLUMNS": str(WIDTH)}
        run = [sys.executable, "-c", code, *words[1:]]
        done = subprocess.run(run, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, f"line {block.line}: {command}\n{done.stdout}{done.stderr}"
        wide = [line for line in done.stdout.splitlines() if len(line) > WIDTH and "--json" not in words]
        assert not wide, f"line {block.line}: {command}\n" + "\n".join(wide)
        if expected.strip():
            same = doctest.OutputChecker().check_output(expected, done.stdout, FLAGS)
            assert same, f"line {block.line}: {command}\nexpected:\n{expected}\ngot:\n{done.stdout}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(page.read_text(), str(page.relative_to(ROOT)), tmp_path, monkeypatch)


def fenced(kind: str, text: str) -> str:
    return f"```{kind}\n{text}\n```\n"


@pytest.mark.parametrize(
    "page",
    [
        fenced("python", "assert 1 == 2"),
        fenced("python", "x = 1") + fenced("python", ">>> x\n2"),
        fenced("console", "$ shardplan no-such-verb"),
    ],
)
def test_the_check_can_fail(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        run_page(page, "a page", tmp_path, monkeypatch)


def test_names_are_shared_and_blocks_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = "<!-- not run: needs eight devices -->\n" + fenced("python", "assert False")
    page = fenced("python", "x = 1") + left_out + fenced("python", ">>> x\n1\n>>> y = x + 1") + "text\n"
    run_page(page + fenced("python", "assert y == 2"), "a page", tmp_path, monkeypatch)
