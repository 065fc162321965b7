"""`benchmarks.gpu --dry`: the code that a GPU will run, in Triton's interpreter, on tiny shapes."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.gpu import ALL, NAMES, SECONDS, case

ROOT = Path(__file__).parents[2]


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: shardplan[triton]")
ONE = "assembly"


def limit(name: str) -> float:
    return SECONDS[name.partition(" ")[0].rstrip(",")]


@needs_triton
def test_a_dry_tuning_writes_what_is_read(tmp_path: Path) -> None:
    """A row for each dtype, described and not, behind the tiles of the table, and what was timed is chosen."""
    from shardplan.fused.triton import product_tiles

    out = tmp_path / "tiles.toml"
    command = [sys.executable, "-m", "benchmarks.fused_tuning", "--dry", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = tomllib.loads(out.read_text())
    assert found["tile"] == product_tiles.product_table()["tile"]
    assert [(row["bytes"], row["described"]) for row in found["timed"]] == [
        (2, True),
        (2, False),
        (4, True),
        (4, False),
    ]
    assert [row["shape"] for row in found["timed"]] == [[8, 16, 32]] * 4
    found["timed"][0]["warps"] = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_tiles, "product_table", lambda: found)
        choose = product_tiles.choose_tile.__wrapped__
        assert choose("cpu", 2, True, 2, 8, 8, 16, 32).warps == 2
        assert choose("cpu", 2, False, 2, 8, 8, 16, 32).warps == choose("cpu", 2, True, 2, 8, 9, 16, 32).warps == 4


@needs_triton
@pytest.mark.parametrize("name", [name for name in NAMES if "torch_symm" not in name and name != ONE])
def test_dry(name: str) -> None:
    row = case(name, True, 4 * limit(name))
    assert row["good"], row
    match name:
        case "two processes, cuda_ipc":
            assert row["said"][1].startswith("FusedTimeout: gemm_all_to_all: rank 1 waited")
        case "compute ops":
            assert row["cases"] >= row["ops"] > 30
        case "kernels by shape":
            assert {one["kernel"] for one in row["rows"]} >= {"product", "rms norm", "adamw"}
        case "times of gemv":
            assert set(row["rows"][0]["seconds"]) == {"fused", "unfused", "compute only"}
        case _:
            assert row["case"] == name


@needs_triton
def test_the_command_writes_what_cases_say(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--only", ONE, "--out", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(path.read_text())
    assert found["parameters"] == {"dry": True} and "triton" in found["device"]
    assert [row["case"] for row in found["cases"]] == [ONE] and found["cases"][0]["good"]


def test_a_case_has_a_deadline() -> None:
    found = case("correct gemm", True, 0.2)
    assert (found["good"], found["why"]) == (False, "not ended after 0 s")
    assert all(name.partition(" ")[0].rstrip(",") in SECONDS for name in NAMES) and ALL < 600


def test_a_case_that_fails_says_why() -> None:
    found = case("no such case", True, 60)
    assert found["good"] is False and "KeyError: 'no such case'" in found["why"]
