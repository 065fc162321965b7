"""Ops and topologies of other packages, found by entry points: through the command, as it is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPS = '''
from dataclasses import dataclass
from typing import ClassVar
from shardplan.core.layout import Layout
from shardplan.core.ops import Exchange
from shardplan.core.ops.general import General


@dataclass(frozen=True, slots=True)
class Nothing(Exchange):
    name: ClassVar[str] = "nothing"


@dataclass(frozen=True, slots=True)
class Jump(General):
    """A move that takes one round, whatever it moves: the planner has nothing like it."""
    name: ClassVar[str] = "jump"
    layout: Layout

    def members(self, t):
        return t.mesh.axes

    def result(self, t):
        return t.with_layout(self.layout)

    def rounds(self, *operands):
        return 1

    @classmethod
    def moves(cls, source, destination):
        return () if source.layout.partial else (cls(destination.layout),)


class Misnamed(Nothing):
    name = "other"

class Slice(Nothing):
    name = "slice"

number = 3
'''
TOPOLOGIES = """
from pathlib import Path
from shardplan.hardware.topology import Topology
def cluster():
    return Topology.load("dgx-a100", nodes=3)
path = str(Path(__file__).parent / "small.toml")
number = 3
"""
PROGRAM = """program
  mesh x=2
  input %0: f32[8@x]
  %1 = {op}(%0; layout=[@x]): f32[8@x]
  %2 = all_gather(%1; dim=0, axes=(x)): f32[8]
  output %2
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder as `pip install` leaves one: modules, and what they bring; a test writes the entry points."""
    (tmp_path / "brought_ops.py").write_text(OPS)
    (tmp_path / "brought_topologies.py").write_text(TOPOLOGIES)
    level = '[[levels]]\nname = "gpu"\nsize = 2\nlink = "switch"\nbandwidth = "7 GB/s"\nlatency = "2 us"\n'
    (tmp_path / "small.toml").write_text(f'name = "small"\n{level}')
    info = tmp_path / "brought-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    return tmp_path


def bring(package: Path, group: str, *points: str) -> None:
    text = "\n".join([f"[shardplan.{group}]", *points])
    (package / "brought-1.0.dist-info" / "entry_points.txt").write_text(text)


def ran(package: Path, *arguments: str, code: str = "") -> str:
    """What a fresh process says, on one stream: the command, or an interpreter that runs `code`."""
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = ["-c", code] if code else ["-m", "shardplan", *arguments]
    done = subprocess.run(
        [sys.executable, *run], capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}
    )
    return done.stdout + done.stderr


def parsed(package: Path, op: str) -> str:
    text = PROGRAM.format(op=op)
    return ran(
        package, code=f"import shardplan as sp\np = sp.Program.parse({text!r})\nprint(p == sp.Program.parse(str(p)))"
    )


def test_an_op_from_outside_is_parsed(package: Path) -> None:
    bring(package, "ops", "nothing = brought_ops:Nothing")
    assert parsed(package, "nothing") == "True\n"
    assert "ParseError: unknown op 'nothin'; legal are slice, " in (said := parsed(package, "nothin"))
    assert said.rstrip().splitlines()[-3].endswith(", gemm_reduce_scatter, nothing")


def test_a_move_from_outside_is_planned_with(package: Path) -> None:
    ends = ("redistribute", "f32[64@(a,b)]{+c}", "f32[64@(b,a)]", "--mesh", "a=3,b=2,c=4")
    without = ran(package, *ends)
    bring(package, "ops", "jump = brought_ops:Jump")
    plan = package / "plan.json"
    said = ran(package, *ends, "--out", str(plan))
    assert " = jump(%1; layout=[@(b,a)])" in said and "jump" not in without
    assert "jump" in ran(package, "show", str(plan)) and ran(package, "check", str(plan)).endswith("\nok\n")


@pytest.mark.parametrize(
    ("points", "says"),
    [
        (["nothing = brought_ops:Absent"], "brought_ops:Absent of shardplan.ops cannot be loaded: AttributeError: "),
        (["nothing = absent:Nothing"], "cannot be loaded: ModuleNotFoundError: No module named 'absent'"),
        (["nothing = brought_ops:number"], "the entry point nothing of shardplan.ops is 3; legal is a class of ops"),
        (["nothing = brought_ops:Misnamed"], "whose name is 'other'; legal is one name"),
        (["slice = brought_ops:Slice"], "; shardplan itself has an op of that name, legal is a new one"),
    ],
)  # fmt: skip
def test_what_is_no_op_is_said(package: Path, points: list[str], says: str) -> None:
    bring(package, "ops", *points)
    assert says in parsed(package, "nothing").splitlines()[-1]


def test_a_topology_from_outside(package: Path) -> None:
    bring(package, "topologies", "three = brought_topologies:cluster", "small = brought_topologies:path")
    asked = ("place", "--mesh", "data=3,tensor=8", "--traffic", "data=1GB", "--topology")
    said = ran(package, *asked, "three")
    assert said == ran(package, *asked, "dgx-a100", "--nodes", "3") and "GB" in said
    load = "import shardplan as sp\nprint(sp.Topology.load('small', gpus=5).describe())"
    assert ran(package, code=load) == "gpu=5\n"
    assert "did you mean 'three'" in ran(package, *asked, "threes").replace("\n", " ").replace("  ", " ")


@pytest.mark.parametrize(
    ("point", "says"),
    [
        ("small = brought_topologies:number", "gives 3; legal is a Topology or a file's path"),
        ("small = absent:x", "the entry point small = absent:x of shardplan.topologies cannot be loaded"),
        ("dgx-h100 = brought_topologies:cluster", "is named like a preset; legal is another name"),
    ],
)
def test_what_is_no_topology_is_said(package: Path, point: str, says: str) -> None:
    bring(package, "topologies", point)
    assert says in ran(package, code="import shardplan as sp\nsp.Topology.load('small')").splitlines()[-1]
