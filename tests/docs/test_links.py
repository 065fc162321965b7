"""What `tests/test_docs.py`, which runs the examples, does not see: links, and commands that are meant to fail.

A console block after `<!-- not run: exits with status N -->` is run here: it must exit with N and print what the page
shows, be it an answer (stdout) or a complaint (stderr).
"""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
FAILING = re.compile(r"<!-- not run: exits with status (\d+) -->\n+```console\n(.*?)^```$", re.M | re.S)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MAIN = "import sys; from shardplan.cli import main; sys.argv[0] = 'shardplan'; main()"


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+)$", FENCE.sub("", page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: str, folder: Path) -> list[str]:
    """The links of a page that lead nowhere; those to other sites are not followed."""
    found: list[str] = []
    for link in LINK.findall(FENCE.sub("", page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = folder / path
        if (path and not target.exists()) or (anchor and anchor not in anchors(target.read_text() if path else page)):
            found.append(link)
    return found


def failing_commands(page: str) -> list[tuple[int, str, str]]:
    """The status, command and expected message of every block that is meant to fail."""
    out: list[tuple[int, str, str]] = []
    for status, text in FAILING.findall(page):
        command, _, message = text.removeprefix("$ ").replace("\\\n", " ").partition("\n")
        out.append((int(status), command, message))
    return out


def fails_as_shown(status: int, command: str, message: str, folder: Path) -> bool:
    """Run a command, and say whether it exits and prints as expected, and nothing else."""
    words = shlex.split(command)
    assert words[0] == "shardplan"
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words[1:]], capture_output=True, text=True, timeout=300, cwd=folder
    )
    said = done.stdout + done.stderr
    return done.returncode == status and doctest.OutputChecker().check_output(message, said, FLAGS)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page.read_text(), page.parent) == []


@pytest.mark.parametrize(
    "case", [c for page in PAGES for c in failing_commands(page.read_text())], ids=lambda case: f"status {case[0]}"
)
def test_commands_fail_as_shown(case: tuple[int, str, str], tmp_path: Path) -> None:
    assert fails_as_shown(*case, tmp_path)


def test_a_status_is_shown_for_each_kind_of_mistake() -> None:
    shown = {status for page in PAGES for status, _, _ in failing_commands(page.read_text())}
    assert shown >= {2, 3}


def test_the_checks_can_fail(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, with marks\n")
    page = "[a](there.md#a-heading-with-marks) [b](there.md#no) [c](gone.md) [d](https://example.com/x)\n"
    assert broken_links(page, tmp_path) == ["there.md#no", "gone.md"]
    command = "shardplan show 'f32[4@y]' --mesh x=2"
    message = "shardplan: unknown axis 'y': the mesh has x=2\n  f32[4@y]\n        ^\n"
    assert fails_as_shown(2, command, message, tmp_path)
    assert not fails_as_shown(3, command, message, tmp_path)
    assert not fails_as_shown(2, command, "shardplan: another message\n", tmp_path)
