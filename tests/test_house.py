"""Rules of the house that no linter knows: short files, docstrings, and nothing of one machine in the text."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
LONGEST = 450

# Written so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.~}>-])/(?:work|root|home|Users|opt|mnt)/\w")
PACKAGE_HOST = re.compile(r"pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|download\.pytorch|deb\.debian|proxy\.golang")


def tracked() -> list[Path]:
    """The files that git tracks, or would after an add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def of_one_machine(text: str) -> list[str]:
    """What in a text names a place of one machine or a package registry."""
    return [match.group() for pattern in (MACHINE_PATH, PACKAGE_HOST) for match in pattern.finditer(text)]


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert lengths
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_every_module_has_a_docstring() -> None:
    paths = [path for path in tracked() if path.suffix == ".py"]
    assert paths
    assert [str(path.relative_to(ROOT)) for path in paths if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_no_text_names_a_machine() -> None:
    found: dict[str, list[str]] = {}
    for path in tracked():
        raw = path.read_bytes()
        if b"\0" not in raw and (names := of_one_machine(raw.decode(errors="replace"))):
            found[str(path.relative_to(ROOT))] = names
    assert found == {}


@pytest.mark.parametrize("text", ["see /" + "work/x", "'/" + "home/me'", "https://pypi" + ".org/simple"])
def test_the_check_can_fail(text: str) -> None:
    assert of_one_machine(text)


@pytest.mark.parametrize("text", ["src/work/x", "./home/x", "a / work", "/dev/shm", "shared/opt/x"])
def test_the_check_spares_the_innocent(text: str) -> None:
    assert of_one_machine(text) == []
