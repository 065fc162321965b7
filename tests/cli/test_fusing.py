"""The command fuse: its table, its object, its files, and its mistakes."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

from core.test_fused import EXPERTS, REFUSED
from execution.fused_cases import EAGER
from shardplan.cli import run_command
from shardplan.core.program import Program
from shardplan.core.text import op_text
from shardplan.hardware.prices.fused import FusedConstants

with_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.txt"
    path.write_text(EXPERTS)
    EAGER.save(tmp_path / "constants.toml")
    return path


def test_a_program_is_fused_and_written(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    constants, out = program.with_name("constants.toml"), program.with_name("out.txt")
    asked = ["fuse", str(program), "--on", "dgx-a100", "--nodes", "1", "--calibration", str(constants)]
    assert run_command([*asked, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "1 candidate: 1 fused; constants: made up"
    assert "\n1      gemm_all_to_all  40 B   440 ms  40 ms" in said
    assert "\n  f32[2@x, 4, 3] f32[2@x, 3, 5] -> f32[2, 4@x, 5]\n" in said
    (step,) = Program.parse(out.read_text()).steps
    assert op_text(step.op, ("a", "b")) == "gemm_all_to_all(%a, %b; tiles=16)"
    assert run_command([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["summary", "source", "saved_seconds", "rows"]
    assert found["rows"][0]["reason"] == "fused" and found["rows"][0]["choice"] == "fused n=16"


def test_what_blocks_stands_below_the_table(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text(REFUSED["several_users"][0])
    assert run_command(["fuse", str(program), "--on", "dgx-a100"]) == 0
    last = " ".join(capsys.readouterr().out.rpartition("\n\n")[2].split())
    assert last.startswith("1: step 0 (einsum(%a, %b; spec=") and last.endswith("legal is by the move alone")


def test_a_model_is_partitioned_first(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["fuse", "llama3-8b", "--on", "dgx-h100", "--nodes", "1", "--strategy", "tensor=8", "--batch", "8"]
    assert run_command([*asked, "--cache", "1024", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["place"] for row in found["rows"]] == ["0F 5.10", "0F 5.17"]
    assert found["source"] == "the topology's figures (dgx-h100), not calibrated"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["llama3-8b", "--on", "dgx-h100"], "fuse of the model 'llama3-8b': no --strategy; legal is one"),
        (["FILE"], "no topology is known to fuse for: give --on"),
        (["FILE", "--on", "dgx-h100", "--batch", "2"], "--batch is of a model; legal with the file"),
        (["FILE", "--on", "dgx-h100", "--measure"], "--measure writes the file of --calibration"),
        (["FILE", "--on", "dgx-h100", "--calibration", "none.toml"], "fused constants 'none.toml' cannot be read"),
        (["llama3-8b", "--strategy", "tensor=8", "--out", "x"], "--out writes one program; legal is a plan"),
        (["none.json", "--on", "dgx-h100"], "cannot read none.json"),
    ],
)
def test_mistakes(arguments: list[str], says: str, program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["fuse", *(str(program) if a == "FILE" else a for a in arguments)]) == 2
    assert capsys.readouterr().err.startswith(f"shardplan: {says}")


@with_torch
def test_constants_are_measured_and_read_back(tmp_path: Path) -> None:
    from shardplan.fused import calibrate

    found = calibrate(0.5)
    found.save(tmp_path / "here.toml")
    again = FusedConstants.load(tmp_path / "here.toml")
    assert again == found and found.backend == "shm"
    assert [kernel.kind for kernel in found.kernels] == ["product", "vector", "bags"]
    assert 0 < found.latency < 1.0 and 1e7 < found.bandwidth < math.inf
    assert "load " in found.source and "efficiency against the library: product 1.00" in found.source
    for kernel in found.kernels:
        own = found.of_kind(kernel.kind)
        assert own.tile_tax[0] == (1, 1.0) and own.tile_tax[1][1] > 1.0 and 0 < own.signal < 1.0
