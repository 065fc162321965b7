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


RUN = "sp.run(plan, [], backend='{0}')"
BIND = "from shardplan.interop.exports.{0} import bind_reduction; bind_reduction(plan.program)"
PYTHON = {
    ("torch", "torch"): (RUN, "import shardplan.interop.torch", BIND),
    ("jax", "jax"): (RUN, "import shardplan.interop.jax", BIND),
    ("mpi4py", "mpi"): (RUN, BIND),
    ("triton", "triton"): ("from shardplan.fused.triton import put",),
    ("matplotlib", "report"): ("from shardplan.report.lab_picture import save_points; save_points('a.png', [])",),
}


@pytest.mark.parametrize(("package", "extra"), PYTHON)
def test_python_names_the_extra(package: str, extra: str) -> None:
    calls = PYTHON[package, extra]
    done = without((package,), PLAN + "".join(TELL.format(call=call.format(extra)) for call in calls))
    assert done.stderr == ""
    assert done.stdout == f"{package} is not installed: pip install 'shardplan[{extra}]'\n" * len(calls)


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
