"""PyTorch's operators with our moves in the place of DTensor's own: some of the database, and that faults are seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra `torch` is not installed")
ROOT = Path(__file__).resolve().parents[2]
OPERATORS = (
    "add", "mm", "softmax", "std", "var", "cumsum", "cat", "split.list_args", "max.reduction_with_dim", "index_select",
    "nn.functional.embedding", "nn.functional.layer_norm", "addmm", "where",
)  # fmt: skip
RUN = "from benchmarks.operators import main; main()"


def measured(out: Path, *arguments: str, before: str = "") -> dict:
    """The result file of the benchmark, run on 4 ranks after `before`."""
    command = [sys.executable, "-c", f"{before}\n{RUN}", "--ranks", "4", "--out", str(out), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(out.parent.glob("*.rows"))
    return json.loads(out.read_text(encoding="utf-8"))


def test_operators_equal_dtensors_own(tmp_path: Path):
    found = measured(tmp_path / "some.json", "--count", "3", "--orders", "60", "--only", *OPERATORS)
    assert found["against ours"] == []
    assert found["operators"] == found["operators that DTensor runs"] == len(OPERATORS)
    assert found["operators in which a move of ours ran"] == len(OPERATORS) and found["moves of ours"] > 300
    verdicts = found["verdicts"]
    assert verdicts["equal"] > 6 * verdicts["rounding"] and verdicts["equal"] > 150
    assert sum(verdicts.values()) == found["cases"] == 3 * 2 * len(OPERATORS) + 2 * 60


SABOTAGE = {
    "an element": ("result = result + 1 if ways.dist.get_rank() == 1 else result", "differs", "values"),
    "a refusal": ("raise ValueError('not today')", "ours refuses", "call: ValueError: not today"),
    "a refusal on one rank": (
        "if ways.dist.get_rank() == 2: raise ValueError('not here')", "ours refuses", "call: ValueError: not here",
    ),
    "a lost process": ("if ways.dist.get_rank() == 3: import os; os._exit(7)", "ours refuses", "exit status 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_fault_of_ours_is_seen(name: str, tmp_path: Path):
    line, verdict, words = SABOTAGE[name]
    before = f"""
from benchmarks import operator_ways as ways
right = ways.moves.moved
def wrong(*arguments):
    result = right(*arguments)
    {line}
    return result
ways.moves.moved = wrong
"""
    found = measured(tmp_path / "wrong.json", "--count", "2", "--orders", "0", "--only", "mm", before=before)
    against = found["against ours"]
    assert verdict in {row["verdict"] for row in against}
    assert any(words in line for row in against for line in row["lines"]), against
