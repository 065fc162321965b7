"""What benchmarks, tests and pages import from the package is there: most benchmarks are run by nobody for weeks."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path for folder in ("benchmarks", "docs", "tests") for path in (ROOT / folder).rglob("*.py"))


def names_imported(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of all that is imported from the package, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shardplan":
            yield from ((node.lineno, str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name, "") for a in node.names if a.name.partition(".")[0] == "shardplan")


@cache
def names_bound(module: str) -> frozenset[str] | None:
    """The names at the top of a module, by its text, and what it names as a string where it loads that later."""
    path = ROOT / "src" / Path(*module.split("."))
    path = init if (init := path / "__init__.py").is_file() else path.with_suffix(".py")
    if not path.is_file():
        return None
    found = {each.stem for each in path.parent.iterdir()} if path.name == "__init__.py" else set[str]()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    open_ = [*tree.body]
    while open_:
        node = open_.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        else:
            open_ += ast.iter_child_nodes(node)
    if "__getattr__" in found:
        found |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return frozenset(found)


def is_there(module: str, name: str) -> bool:
    found = names_bound(module)
    return found is not None and (not name or name in found)


def test_all_that_is_imported_from_the_package_is_there() -> None:
    lacking = [
        f"{path.relative_to(ROOT)}:{line}: {module} has no {name}"
        for path in FILES
        for line, module, name in names_imported(ast.parse(path.read_text(encoding="utf-8")))
        if not is_there(module, name)
    ]
    assert not lacking, "\n".join(lacking)


@pytest.mark.parametrize(("module", "name"), [("shardplan.core.tensor", "TensorTypo"), ("shardplan.corr", "tensor")])
def test_a_name_that_is_gone_is_seen(module: str, name: str) -> None:
    """The test above could else pass of anything."""
    assert not is_there(module, name)
