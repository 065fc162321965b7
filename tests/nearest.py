"""The tests nearest to what has changed: `python -m tests.nearest [BASE]` prints their files and folders.

Tests mirror the package: of a module they are the files of the mirrored folder, or of the nearest one above it that
there is, which name the module or begin with its name; the laws of `core` are always among them. What has changed is
what differs from the commit BASE, by default the last one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
PACKAGE = Path("src/shardplan")
LAWS = ("layout", "mesh", "tensor", "text", "messages", "reductions", "ops", "accounting", "reference")
ALWAYS = (*(Path(f"tests/core/test_{name}.py") for name in LAWS), Path("tests/test_surface.py"))


def changed_files(base: str) -> list[Path]:
    """Return the files that differ from a commit, and those that git does not know yet, from the root."""
    asked = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    said = (
        subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True) for words in asked
    )
    return [Path(line) for one in said for line in one.stdout.splitlines()]


def nearest_tests(file: Path) -> list[Path]:
    """Return the tests of a changed file, from the root: itself where it is one; none where nothing tests it."""
    if file.parts[:1] == ("tests",) and file.name.startswith("test_"):
        return [file] if (ROOT / file).is_file() else []
    if not file.is_relative_to(PACKAGE) or file.suffix != ".py":
        return []
    inside = file.relative_to(PACKAGE).with_suffix("")
    folder = next(TESTS / up for up in inside.parents if (TESTS / up).is_dir())
    names = ".".join(("shardplan", *inside.parts)).removesuffix(".__init__"), f"test_{inside.name}"
    found = (test for test in sorted(folder.rglob("test_*.py")) if folder != TESTS or test.parent == TESTS)
    return [
        test.relative_to(ROOT) for test in found if test.stem.startswith(names[1]) or f"{names[0]} " in test.read_text()
    ]


def main(base: str) -> None:
    found = [test for file in changed_files(base) for test in nearest_tests(file)]
    print(*dict.fromkeys((*ALWAYS, *found)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
