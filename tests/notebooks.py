"""Executes the notebooks of `examples/notebooks` without Jupyter: `python -m tests.notebooks` writes what cells say.

A cell says what it prints, and its last expression: as text and, where it has `_repr_html_`, as HTML. An error is a
cell's answer where the cell is tagged `raises-exception`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"


def notebooks() -> list[Path]:
    """All of them."""
    return sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Its cells of code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Execute the cells in one namespace, and yield what each says, as nbformat 4 has it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), 1):
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        printed, value = io.StringIO(), None
        found: list[dict[str, Any]] = []
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(ast.Module(body, []), "cell", "exec"), names)
                value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            except Exception as error:
                if "raises-exception" not in cell["metadata"].get("tags", ()):
                    raise
                found = [{"output_type": "error", "ename": type(error).__name__, "evalue": str(error),
                          "traceback": [f"{type(error).__name__}: {error}"]}]  # fmt: skip
        if text := printed.getvalue():
            found.insert(0, {"name": "stdout", "output_type": "stream", "text": text.splitlines(True)})
        if value is not None:
            html = value._repr_html_() if hasattr(value, "_repr_html_") else ""
            data = {"text/plain": (str if html else repr)(value).splitlines(True)}
            data |= {"text/html": html.splitlines(True)} if html else {}
            found.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
        yield found


def main() -> None:
    """Write what the cells of every notebook say."""
    for path in notebooks():
        notebook = json.loads(path.read_text())
        for number, (cell, said) in enumerate(zip(code_cells(notebook), outputs(notebook), strict=True), 1):
            cell |= {"execution_count": number, "outputs": said}
        path.write_text(json.dumps(notebook, indent=1) + "\n")
        print(path.name)


if __name__ == "__main__":
    main()
