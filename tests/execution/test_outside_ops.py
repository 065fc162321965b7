"""The package in `examples/outside_ops`, as `docs/extend.md` has it: its ops go through the installed command."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracle
from compute_examples import UNEQUAL
from execution.lab_here import needs_lab
from execution.mpi_launch import MPIEXEC, launched
from gradient_examples import arrays, back, by_torch, lettered
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.core.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "outside_ops"
FILES = [EXAMPLE / "outside_ops" / name for name in ("gather_to_root.py", "causal_mask.py", "capped_glu.py")]
GATHER, MASK, GLU = (path.read_text() for path in FILES)
# The first tile takes the last one's place, and so on: tiles are of one size here.
REVERSED = GATHER.replace("Boxes(t, group.place(k))", "Boxes(t, group.place(group.size - 1 - k))").replace(
    'after.part("y", before)', 'after.part("y", Boxes(t, group.place(group.size - 1)))'
)
PROGRAM = """program
  mesh x=3
  input %0: f32[2, 6, 6@x]
  %1 = causal_mask(%0; value=-7.0): f32[2, 6, 6@x]
  %2 = gather_to_root(%1; dim=2, axes=(x)): f32[2, 6, 6]{root:x}
  output %2
"""


def installed(folder: Path, gather: str = GATHER) -> Path:
    """A folder as `pip install` leaves one, with the ops of the example, and a program beside it."""
    (folder / "outside_ops").mkdir()
    for name, text in {"__init__": "", "gather_to_root": gather, "causal_mask": MASK, "capped_glu": GLU}.items():
        (folder / "outside_ops" / f"{name}.py").write_text(text)
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = folder / f"outside_ops-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [f"{name} = {value}" for name, value in project["entry-points"]["shardplan.ops"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[shardplan.ops]", *points]))
    (folder / "program.txt").write_text(PROGRAM)
    return folder


def said(folder: Path, *arguments: str, launcher: tuple[str, ...] = (sys.executable, "-m")) -> str:
    """What the command prints; it must succeed."""
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=3"
    done = subprocess.run(
        [*launcher, "shardplan", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def checksum(text: str) -> str:
    found = re.search(r"%2 +([0-9a-f]{16})", text)
    assert found, text
    return found[1]


def test_the_page_shows_the_files_and_they_are_short() -> None:
    page = (ROOT / "docs" / "extend.md").read_text()
    for path in FILES:
        assert f"```python\n{path.read_text()}```" in page
        assert len(path.read_text().splitlines()) <= 40


def test_what_is_made_of_others_has_torchs_gradient() -> None:
    """On every legal assignment of axes: the op, its gradient, and the text of both."""
    torch = pytest.importorskip("torch")
    names: dict[str, Any] = {"__name__": "capped_glu"}
    exec(compile(GLU, "capped_glu", "exec"), names)
    unit = names["CappedGlu"]
    example = lettered(
        unit(2.0),
        ("f64 ij", "f64 jk", "f64 jk"),
        lambda x, gate, up: 2 * torch.tanh(torch.nn.functional.silu(x @ gate) * (x @ up) / 2),
        11,
    )
    rng, count = np.random.default_rng(0), 0
    given = arrays(example, UNEQUAL, rng)
    seed = rng.normal(size=(UNEQUAL["i"], UNEQUAL["k"]))
    whole = by_torch(example, given, [seed])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPS, unit.name, unit)
        for op, types in example.legal_ones(UNEQUAL):
            program = back(op, types)
            assert Program.parse(str(program)) == program
            shards = [oracle.spread(a, t, rng) for a, t in zip([*given, seed], program.input_types, strict=True)]
            for x, t, want in zip(run_reference(program, shards), program.output_types, whole, strict=True):
                assert oracle.wrong(x, t, want, 1e-9) is None, [str(t) for t in types]
            count += 1
    assert count == example.legal


def test_it_is_planned_with_where_it_is_cheaper(tmp_path: Path) -> None:
    folder = installed(tmp_path)
    ends = ("redistribute", "i32[6, 60@x]", "i32[6, 60]{root:x}", "--mesh", "x=3", "--topology", "dgx-h100")
    assert " = gather_to_root(%0; dim=1, axes=(x))" in said(folder, *ends, "--out", "plan.json")
    assert said(folder, "check", "plan.json").endswith("\nok\n")


def test_reversed_tiles_are_another_result(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain, backwards = (installed(tmp_path / name, text) for name, text in (("a", GATHER), ("b", REVERSED)))
    assert checksum(said(plain, "run", "program.txt")) != checksum(said(backwards, "run", "program.txt"))


LAUNCHERS = [
    pytest.param("torch", (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")),
    pytest.param("mpi", (str(MPIEXEC), "-n", "3", sys.executable), marks=launched),
    pytest.param("jax", (sys.executable,)),
]


@pytest.mark.parametrize(("backend", "launcher"), LAUNCHERS)
@pytest.mark.parametrize("text", [GATHER, REVERSED], ids=["as it is", "reversed"])
def test_it_runs_on_every_backend(tmp_path: Path, backend: str, launcher: tuple[str, ...], text: str) -> None:
    """Every process compares its shards with the reference, which delivers what the lowering says."""
    folder = installed(tmp_path, text)
    shown = said(folder, "run", "program.txt", "--backend", backend, launcher=(*launcher, "-m"))
    assert "ok: every shard of this process" in shown
    assert "gather_to_root(%1; dim=2, axes=(x))" in shown


@needs_lab
def test_it_is_measured_in_the_lab_and_predicted(tmp_path: Path) -> None:
    folder = installed(tmp_path)
    (folder / "large.txt").write_text(PROGRAM.replace("2, 6, 6", "64, 96, 96"))
    shown = said(folder, "lab", "run", "large.txt", "--cluster", "3", "--rates", "200", "--repetitions", "2")
    assert "gather_to_root" in shown
