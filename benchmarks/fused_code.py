"""The fused kernels compiled ahead of time for sm_90 and gfx942, by Triton 3.9 and 3.6, and what their text says.

3.9 is the one that is installed; 3.6, with numpy 2.3, is put into an environment of its own below `build/`. Of each
kernel: a release add at system scope, a barrier of the program before it, an acquire at system scope, and wide words.
Altered kernels, without the hint of alignment, the barrier, or the scope, must fail just that. Nothing is spilled.

Beside that it counts code: lines of Python that are no comment, docstring or blank, of the folder and of an operator.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, record, table, write

OTHER = ROOT / "build" / "triton36"
NEEDS = ("triton==3.6.*", "numpy==2.3.*", "ml_dtypes>=0.5", "msgspec>=0.19")


def _python(own: Path) -> Path:
    """The interpreter of an environment with Triton 3.6, made where there is none."""
    python = own / "bin" / "python"
    if not (own / ".stamp").exists():
        subprocess.run([sys.executable, "-m", "venv", str(own)], check=True)
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([str(python), "-m", "pip", "install", *quiet, *NEEDS], check=True)
        (own / ".stamp").touch()
    return python


def _said(python: Path) -> dict[str, Any]:
    """What an environment's Triton makes of the kernels, nothing taken from its cache."""
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join(str(ROOT / part) for part in ("src", "."))
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": path}
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [str(python), "-m", "benchmarks.fused_text"], cwd=ROOT, env=environment, capture_output=True, text=True
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


FUSED = ROOT / "src" / "shardplan" / "fused"
# What is an operator's own: files, and functions of others.
OPERATORS = {
    "grouped_gemm_all_to_all": (
        "operators/grouped.py", "triton/grouped.py", "triton/grouped_kernel.py", "library.py:grouped_gemm_all_to_all",
        "library.py:_fake_grouped", "triton/serving.py:grouped_multiply", "triton/serving.py:move_grouped_back",
    ),
    "all_gather_gemm, gemm_reduce_scatter": (
        "operators/tensor_parallel.py", "triton/tensor_parallel.py", "triton/gather_kernel.py",
        "library.py:all_gather_gemm", "library.py:gemm_reduce_scatter", "library.py:_fake_gather",
        "library.py:_fake_scatter", "library.py:_back_of_gather", "library.py:_fake_back_of_gather",
        "library.py:_back_of_scatter", "triton/serving.py:gather_multiply", "triton/serving.py:multiply_scatter",
    ),
}  # fmt: skip


def code_lines(text: str, function: str = "") -> int:
    """Lines of Python on which there is code, of a text or of one of its functions, its first line included."""
    lines: set[int] = set()
    fresh = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            fresh = True
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            if not (fresh and token.type == tokenize.STRING):  # a docstring
                lines.update(range(token.start[0], token.end[0] + 1))
            fresh = False
    if not function:
        return len(lines)
    (node,) = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef) and x.name == function]
    return len(lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))


def count_code() -> dict[str, Any]:
    """Lines of code of `fused`, and of operators, without its entry in `SPECS`."""

    def of(place: str) -> int:
        path, _, function = place.partition(":")
        return code_lines((FUSED / path).read_text(), function)

    return {
        "fused, Python (asked 5102)": sum(code_lines(path.read_text()) for path in sorted(FUSED.rglob("*.py"))),
        "of an operator (asked 150)": {name: sum(map(of, places)) for name, places in OPERATORS.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused_code", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "fused_code.json", help="the result file")
    parser.add_argument("--python", type=Path, default=None, help="an interpreter that has Triton 3.6")
    options = parser.parse_args()
    found = [_said(Path(sys.executable)), _said(options.python or _python(OTHER))]
    keys = ("kernel", "target", "variant", "source", "signal", "barrier", "wait", "wide", "resources")
    rows = [{"triton": each["triton"]} | row for each in found for row in each["rows"]]
    controls = [{"triton": each["triton"]} | row for each in found for row in each["controls"]]
    print(table(("triton", *keys), [[row.get(key, "") for key in ("triton", *keys)] for row in rows]))
    print(table(tuple(controls[0]), [[str(value) for value in row.values()] for row in controls]))
    good = all(row.get(key, True) for row in rows for key in keys[4:-1])
    good &= all(row["resources"].get("spilled") == 0 for row in rows)
    good &= all(row["fails"] == sorted(row["must"].split()) for row in controls)
    print("all hold, and altered kernels fail what they must" if good else "NOT all hold")
    lines = count_code()
    print(lines)
    said = {"good": good, "lines": lines, "rows": rows, "controls": controls}
    write(options.out, record({"triton": [each["triton"] for each in found]}, said))
    sys.exit(not good)


if __name__ == "__main__":
    main()
