"""Names say what functions do: a bare participle or adjective says nothing, and one name many files define says little.

The numbers are what there is; they only fall. Part 19 asks for 150, 100 and none.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent.parent / "src" / "shardplan"
FUNCTIONS, METHODS, SPREAD, FILES = 139, 114, 2, 3
PROTOCOL = {"run", "main", "check", "parse", "text", "of", "load", "save", "to_dict", "from_dict", "describe"}
VERBS = {"seed", "feed", "need", "speed", "exceed", "proceed", "succeed", "embed", "shed", "bleed"}  # and nouns
IRREGULAR = set(re.findall("[a-z]+", """
    kept laid made told said met ran found dealt held seen drawn sent given taken lost known grown shown written
    bound built spent sought brought bought thought caught taught felt led fed hidden driven chosen broken spoken
    begun done gone worn torn paid meant sold stood struck swept thrown woven left slept won hung lent borne risen
    fallen stolen frozen forgotten got withheld understood undone redone rebuilt stuck wound bent
"""))  # fmt: skip
GENERIC = set(re.findall("[a-z]+", """
    alike every own each one all any both other others same such here there apart together alone whole inside
    outside within without behind before after along once again away back first last even short near at on in by so
    thus else rest many much more most few less least also only just still yet ahead late later early where when
    what which who how whose some none nothing something thing things way ways about around across beside between
    beyond over under upon until while plain free true right wrong good bad
"""))  # fmt: skip


def is_bare(name: str) -> bool:
    """Say whether a name is one word, and that word a participle or one that says nothing."""
    word = name.strip("_")
    if not re.fullmatch("[a-z]+", word):
        return False
    return (len(word) > 3 and word.endswith("ed") and word not in VERBS) or word in IRREGULAR | GENERIC


@cache
def definitions(root: Path) -> list[tuple[Path, str, bool]]:
    """Return every function and method at the top of a module or class: its file, its name, whether it is a method."""
    found: list[tuple[Path, str, bool]] = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            inside = node.body if isinstance(node, ast.ClassDef) else []
            for one, method in ((node, False), *((one, True) for one in inside)):
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not one.name.startswith("__"):
                    found.append((path, one.name, method))
    return found


def test_bare_names_become_fewer() -> None:
    found = Counter(method for _, name, method in definitions(SOURCES) if is_bare(name))
    assert found[False] <= FUNCTIONS, "name a function by a verb with its object, or by what it returns"
    assert found[True] <= METHODS, "name a method by a verb with its object, or by what it returns"


def test_few_names_are_defined_by_many_files() -> None:
    files: dict[str, set[Path]] = {}
    for path, name, method in definitions(SOURCES):
        if not method and not name.startswith("_") and name not in PROTOCOL:
            files.setdefault(name, set()).add(path)
    assert len([name for name, paths in files.items() if len(paths) > FILES]) <= SPREAD


@pytest.mark.parametrize(("name", "bare"), [("_kept", True), ("answered", True), ("inside", True), ("embed", False),
                                            ("kept_bytes", False), ("run", False), ("split", False)])  # fmt: skip
def test_which_names_are_bare(name: str, bare: bool, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(f"def {name}(): ...\nclass A:\n    def {name}(self): ...\n")
    assert [is_bare(one) for _, one, _ in definitions(tmp_path)] == [bare, bare]
