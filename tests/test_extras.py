"""A package that an extra installs and that is missing: one line that says how to install it, never a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).parents[1] / "src")
# Stands in for a machine without the packages: their import fails as that of a package that is not there.
BLOCK = """
import sys
sys.path.insert(0, {source!r})
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""
PLAN = """
import shardplan as sp
plan = sp.redistribute("f32[4@x]", "f32[4]", mesh="x=2")
"""
TELL = """
try:
    {call}
except sp.ShardplanError as error:
    assert isinstance(error, ImportError), type(error)
    print(error)
"""


def without(packages: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    whole = BLOCK.format(source=SOURCE, packages=packages) + code
    return subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=300)


PYTHON = [
    ("torch", "torch", "sp.run(plan, [], backend='torch')"),
    ("jax", "jax", "sp.run(plan, [], backend='jax')"),
    ("mpi4py", "mpi", "sp.run(plan, [], backend='mpi')"),
    ("torch", "torch", "import shardplan.interop.torch"),
    ("jax", "jax", "import shardplan.interop.jax"),
    ("torch", "torch", "from shardplan.interop.exports.torch import bind_reduction; bind_reduction(plan.program)"),
    ("jax", "jax", "from shardplan.interop.exports.jax import bind_reduction; bind_reduction(plan.program)"),
    ("mpi4py", "mpi", "from shardplan.interop.exports.mpi import bind_reduction; bind_reduction(plan.program)"),
    ("triton", "triton", "from shardplan.fused.triton import put"),
    ("matplotlib", "report", "from shardplan.report.lab_picture import save_points; save_points('a.png', [])"),
]


@pytest.mark.parametrize(("package", "extra", "call"), PYTHON, ids=[call[-45:] for *_, call in PYTHON])
def test_python_names_the_extra(package: str, extra: str, call: str) -> None:
    done = without((package,), PLAN + TELL.format(call=call))
    assert done.stderr == ""
    assert done.stdout == f"{package} is not installed: pip install 'shardplan[{extra}]'\n"


@pytest.mark.parametrize(("backend", "package"), [("torch", "torch"), ("jax", "jax"), ("mpi", "mpi4py")])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_the_command_line_names_the_extra(tmp_path: Path, backend: str, package: str, more: list[str]) -> None:
    path = tmp_path / "plan.json"
    arguments = ["run", str(path), "--backend", backend, *more]
    code = (
        f"plan.save({str(path)!r})\nimport sys\nsys.argv = ['shardplan', *{arguments!r}]\n"
        "from shardplan.cli import main\nmain()\n"
    )
    done = without((package,), PLAN + code)
    told = f"{package} is not installed: pip install 'shardplan[{backend}]'"
    assert (done.returncode, done.stderr) == (3, f"shardplan: {told}\n")
    if more:
        assert json.loads(done.stdout) == {"error": "MissingExtra", "message": told, "status": 3}
    else:
        assert done.stdout == ""


def test_what_is_installed_is_imported() -> None:
    """The check can fail: without the block nothing is said."""
    done = without((), PLAN + TELL.format(call="import shardplan.interop.torch"))
    assert (done.stdout, done.stderr) == ("", "")
