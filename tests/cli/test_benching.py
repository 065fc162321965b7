"""The command bench: what it lists is there, in the wheel too, and runs without the checkout."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardplan.cli import run_command
from shardplan.cli.benching import BENCHES, bench_root
from shardplan.cli.statuses import DONE, MISTAKE

ROOT = Path(__file__).resolve().parents[2]
PACKED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
    "force-include"
]


def test_the_list_fits_a_terminal_and_each_is_packed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(BENCHES) and max(map(len, lines)) <= 80
    for name, one in BENCHES.items():
        assert PACKED[f"benchmarks/{name}.py"] == f"shardplan/bench/benchmarks/{name}.py"
        assert f"shardplan bench {name}" in (ROOT / "docs" / f"paper-{one.paper}.md").read_text(encoding="utf-8")
    assert bench_root() == ROOT


def test_what_is_packed_runs_by_itself(tmp_path: Path) -> None:
    """Laid out as in the wheel, without the checkout, modules and what they read are found; no framework is loaded."""
    for source, target in PACKED.items():
        copy = tmp_path / Path(target).relative_to("shardplan/bench")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / source).read_bytes())
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n"
        f"import benchmarks.common\nfor name in {list(BENCHES)}: __import__('benchmarks.' + name)\n"
        f"from benchmarks import fused_dlrm as d\n"
        f"facts = {{k: v['value'] for k, v in d.assumptions().items() if 'value' in v}}\n"
        f"d.MeasuredCosts.load(d.RESULTS / facts['costs'], d.RESULTS / facts['taxes'])\n"
        f"assert benchmarks.common.__file__.startswith({str(tmp_path)!r})\n"
        "assert not {'torch', 'jax', 'scipy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_table_is_worked_out_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv, paths = list(sys.argv), list(sys.path)
    assert run_command(["bench", "reduction_peers"]) == DONE
    assert "written:" in capsys.readouterr().out
    told = json.loads((tmp_path / "reduction_peers.json").read_text(encoding="utf-8"))
    committed = json.loads((ROOT / "benchmarks" / "results" / "reduction_peers.json").read_text(encoding="utf-8"))
    assert told.keys() == committed.keys() and (sys.argv, sys.path) == (argv, paths)
    assert run_command(["bench", "fused", "--json"]) == MISTAKE
    assert "legal: over_bound" in json.loads(capsys.readouterr().out)["message"]
    assert run_command(["bench", "--count", "3"]) == MISTAKE
