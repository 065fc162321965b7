"""Rules of the house that no linter knows: short files, docstrings, no import circles, each class name used once, and
nothing of one machine in the text.
"""

import ast
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from token import COMMENT, NL, STRING
from tokenize import generate_tokens

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
LONGEST = 400

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


@dataclass(frozen=True)
class Outline:
    """What these rules ask of a module: its imports and its classes, wherever they stand."""

    imports: list[ast.Import | ast.ImportFrom]
    classes: list[str]


@cache
def outline_of(text: str) -> Outline:
    nodes = list(ast.walk(ast.parse(text)))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return Outline(imports, [node.name for node in nodes if isinstance(node, ast.ClassDef)])


def modules(root: Path) -> dict[str, Outline]:
    """The outline of every module below `root`, by its dotted name."""
    found: dict[str, Outline] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = outline_of(path.read_text())
    return found


def imported(module: Outline, known: set[str]) -> set[str]:
    """The modules among `known` that a module imports anywhere: at its top, inside functions, for types only."""
    found: set[str] = set()
    for node in module.imports:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (parts & known) | ({node.module} if parts - known else set())
    return found & known


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The largest sets of modules that reach each other along imports."""
    reached: dict[str, set[str]] = {}
    for module in arrows:
        seen: set[str] = set()
        ahead = [module]
        while ahead:
            new = arrows[ahead.pop()] - seen
            seen |= new
            ahead += new
        reached[module] = seen
    # A module that reaches itself is in a circle with all that it reaches and that reach it.
    return [
        list(c)
        for c in sorted({tuple(sorted(b for b in to if a in reached[b])) for a, to in reached.items() if a in to})
    ]


def circles_below(root: Path) -> list[list[str]]:
    found = modules(root)
    known = set(found)
    return circles({name: imported(module, known) - {name} for name, module in found.items()})


def test_imports_go_in_no_circle() -> None:
    assert len(modules(ROOT / "src")) > 100
    assert circles_below(ROOT / "src") == []


@pytest.mark.parametrize(
    "back",
    [
        "import p.a",
        "from p import a",
        "from p.a import x",
        "def f():\n    from p.a import x",
        "if TYPE_CHECKING:\n    import p.a",
    ],
)
def test_a_circle_is_found(back: str, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    for name, text in {
        "__init__": "",
        "a": "from p.b import y",
        "b": "from p import c",
        "c": back,
        "d": "import p.a",
    }.items():
        (tmp_path / "p" / f"{name}.py").write_text(text)
    assert circles_below(tmp_path) == [["p.a", "p.b", "p.c"]]
    (tmp_path / "p" / "c.py").write_text("import d")
    assert circles_below(tmp_path) == []


def callers_of(room: str, root: Path, known: set[str]) -> dict[str, set[str]]:
    """The modules below `root`, without those of a room, that import something of the room, and what."""
    inside = {name for name in known if f"{name}.".startswith(f"{room}.")}
    found = {name: imported(module, inside) for name, module in modules(root).items() if name not in inside}
    return {name: wanted for name, wanted in found.items() if wanted}


def test_distir_is_reproduced_behind_one_entry() -> None:
    """Nothing of the package stands on it, and who compares with it asks its entry."""
    room, known = "shardplan.simulation.parity", set(modules(ROOT / "src"))
    assert room in known
    assert callers_of(room, ROOT / "src", known) == {}
    asking = callers_of(room, ROOT / "benchmarks", known)
    assert set(asking) >= {"distir_parity", "distir_grids"}
    assert {name for wanted in asking.values() for name in wanted} == {room}


def test_a_caller_is_found(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("from p.inner import x")
    (tmp_path / "p" / "inner.py").write_text("x = 1")
    (tmp_path / "a.py").write_text("def f():\n    from p.inner import x")
    (tmp_path / "b.py").write_text("from p import x")
    (tmp_path / "pq.py").write_text("import a")
    assert callers_of("p", tmp_path, set(modules(tmp_path))) == {"a": {"p.inner"}, "b": {"p"}}


def repeated_classes(root: Path) -> dict[str, list[str]]:
    """Class names that stand more than once, at the top of modules or inside, and where."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, module in modules(root).items():
        for one in module.classes:
            found[one].append(name)
    return {name: where for name, where in found.items() if len(where) > 1}


def test_a_class_name_is_used_once() -> None:
    assert repeated_classes(ROOT / "src") == {}


def test_a_class_name_used_twice_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Edge: ...\nclass Row: ...\n")
    (tmp_path / "b.py").write_text("def f():\n    class Edge: ...\n")
    assert repeated_classes(tmp_path) == {"Edge": ["a", "b"]}


def has_docstring(text: str) -> bool:
    """Whether a module begins with a string that says something; to read a whole module for that takes long."""
    tokens = generate_tokens(StringIO(text).readline)
    first = next(token for token in tokens if token.type not in (COMMENT, NL))
    return first.type == STRING and bool(ast.literal_eval(first.string).strip())


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ('"""It says."""', True),
        ("#!/usr/bin/env python\n\n'One.'\nx = 1", True),
        ("x = 'none'", False),
        ("", False),
        ("''", False),
    ],
)
def test_which_texts_have_a_docstring(text: str, there: bool) -> None:
    assert has_docstring(text) == there


def test_every_module_has_a_docstring() -> None:
    paths = [path for path in tracked() if path.suffix == ".py"]
    assert paths
    assert [str(path.relative_to(ROOT)) for path in paths if not has_docstring(path.read_text())] == []


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
