"""`import shardplan` stays light: it loads no framework and no package of the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ["torch", "jax", "jaxlib", "triton", "mpi4py", "onnx", "matplotlib", "jinja2", "typer", "rich"]


def loaded(code: str, path: Path | None = None) -> list[str]:
    """The packages of `HEAVY` that a fresh interpreter has loaded after running `code`, `path` being importable."""
    before = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    after = f"\nimport sys, json; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", before + code + after], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", ["shardplan", "shardplan.interop.safetensors", "shardplan.interop.exports.export"])
def test_import_loads_nothing_heavy(module: str) -> None:
    assert loaded(f"import {module}") == []


@pytest.mark.parametrize("name", HEAVY)
def test_the_check_can_fail(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "innocent.py").write_text(f"import shardplan\nimport {name}\n")
    assert loaded("import innocent", tmp_path) == [name]
