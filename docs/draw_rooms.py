"""Draw the rooms of the package and what they import, from the code, into `docs/architecture.md`.

    python docs/draw_rooms.py

An arrow goes from a room to one that it imports, at the top of a file or inside a function, unless another arrow's way
leads there too; the table below the picture has every import.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "shardplan"
PAGE = Path(__file__).with_name("architecture.md")
DRAWN = re.compile(r"(?<=<!-- drawn by docs/draw_rooms.py -->\n).*?(?=<!-- end of what is drawn -->)", re.S)


def room_sentences() -> dict[str, str]:
    """Return what each room is, as the package's docstring says it, by name, lowest first."""
    text = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))) or ""
    return dict(re.findall(r"^- `(\w+)` +(.+)$", text, re.M))


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a file imports from the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def room_imports() -> dict[str, set[str]]:
    """Return the rooms that each room imports, itself left out."""
    rooms = room_sentences()
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in rooms:  # the package's own __init__ and __main__
            continue
        for name in imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if package == "shardplan" and target in rooms and target != room:
                found[room].add(target)
    return found


def without_shortcuts(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the fewest arrows with the same ways: the transitive reduction of a graph without circles."""

    def reached(room: str) -> set[str]:
        return {further for one in imports[room] for further in {one} | reached(one)}

    return {room: {one for one in of if not any(one in reached(other) for other in of)} for room, of in imports.items()}


def drawing() -> str:
    """Return the picture and the table, as the page has them."""
    sentences, imports = room_sentences(), room_imports()
    order = list(sentences)
    lines = ["", "```mermaid", "graph TD"]
    for room, of in reversed(without_shortcuts(imports).items()):
        lines += [f"  {room} --> {one}" for one in sorted(of, key=order.index, reverse=True)]
    lines += ["```", "", "| room | is | imports |", "|---|---|---|"]
    for room in reversed(order):
        names = ", ".join(f"`{one}`" for one in sorted(imports[room], key=order.index, reverse=True)) or "nothing"
        lines.append(f"| [`{room}`]({'../src/shardplan/' + room_path(room)}) | {sentences[room]} | {names} |")
    return "\n".join([*lines, "", ""])


def room_path(room: str) -> str:
    """Return where a room is read first, below the package."""
    return f"{room}/__init__.py" if (PACKAGE / room).is_dir() else f"{room}.py"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(DRAWN.sub(lambda _: drawing(), page), encoding="utf-8")
