"""`import shardplan` stays light: it loads no framework and no package of the command line."""

import json
import subprocess
import sys
from pathlib import Path

HEAVY = ["torch", "jax", "jaxlib", "triton", "mpi4py", "onnx", "matplotlib", "jinja2", "typer", "rich"]


def loaded(code: str, path: Path | None = None) -> list[str]:
    """The packages of `HEAVY` that a fresh interpreter has loaded after running `code`, `path` being importable."""
    before = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    after = f"\nimport sys, json; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", before + code + after], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_import_loads_nothing_heavy() -> None:
    modules = "shardplan, shardplan.interop.safetensors, shardplan.interop.exports.export"
    assert loaded(f"import {modules}\nshardplan.redistribute") == []


def test_the_check_can_fail(tmp_path: Path) -> None:
    for name in HEAVY:
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "innocent.py").write_text(f"import shardplan\nimport {', '.join(HEAVY)}\n")
    assert loaded("import innocent", tmp_path) == HEAVY


ELSEWHERE = """
import os, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "geteuid", "getuid", "sched_getaffinity", "posix_fallocate", "O_DIRECTORY"):
    if hasattr(os, name):
        delattr(os, name)
from shardplan.cli import run_command
for words in (
    "plan llama3-8b --on dgx-h100 --nodes 1 --batch 8 --fit fsdp",
    "audit --on dgx-h100 --nodes 2 --mesh data=2,tensor=8 --traffic tensor=2GB",
    "redistribute f32[8@x] f32[8] --mesh x=2 --out plan.json",
    "check plan.json",
    "run plan.json",
):
    assert run_command(words.split()) == 0, words
"""


def test_plans_audits_and_moves_need_nothing_that_other_systems_lack(tmp_path: Path) -> None:
    """What is of Linux and macOS, or of Linux alone, in Python's own library is hidden as on Windows."""
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
