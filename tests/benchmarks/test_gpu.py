"""`benchmarks.gpu --dry`: the code that a GPU will run, in Triton's interpreter, on tiny shapes."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.gpu import ALL, NAMES, SECONDS, case

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: shardplan[triton]")
def test_dry(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(path.read_text())
    assert found["parameters"] == {"dry": True} and "triton" in found["device"]
    rows = {row["case"]: row for row in found["cases"]}
    assert list(rows) == [name for name in NAMES if "torch_symm" not in name]
    assert rows["two processes, cuda_ipc"]["said"][1].startswith("FusedTimeout: gemm_all_to_all: rank 1 waited")
    assert rows["compute ops"]["cases"] >= rows["compute ops"]["ops"] > 30
    assert {row["kernel"] for row in rows["kernels by shape"]["rows"]} >= {"product", "rms norm", "adamw"}
    assert set(rows["times of gemv"]["rows"][0]["seconds"]) == {"fused", "unfused", "compute only"}


def test_a_case_has_a_deadline() -> None:
    found = case("correct gemm", True, 0.2)
    assert (found["good"], found["why"]) == (False, "not ended after 0 s")
    assert all(name.partition(" ")[0].rstrip(",") in SECONDS for name in NAMES) and ALL < 600


def test_a_case_that_fails_says_why() -> None:
    found = case("no such case", True, 60)
    assert found["good"] is False and "KeyError: 'no such case'" in found["why"]
