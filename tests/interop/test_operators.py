"""PyTorch's operators with our moves in the place of DTensor's own: some of the database, and that faults are seen."""

import json
from pathlib import Path

import pytest

from execution.torch_launch import launch

pytest.importorskip("torch", reason="the extra `torch` is not installed")
CHILD = Path(__file__).with_name("operators_child.py")
OPERATORS = (
    "add", "mm", "softmax", "std", "var", "cumsum", "cat", "split.list_args", "max.reduction_with_dim", "index_select",
    "nn.functional.embedding", "nn.functional.layer_norm", "addmm", "where",
)  # fmt: skip


def measured(out: Path, fault: str, *arguments: str) -> dict:
    """The result file of the benchmark, run on 4 ranks with a fault of ours; its process forks them itself."""
    status, _, err = launch(1, CHILD, fault, "--ranks", "4", "--out", out, *arguments, seconds=600)
    assert status == 0, err[-3000:]
    assert not list(out.parent.glob("*.rows"))
    return json.loads(out.read_text(encoding="utf-8"))


def test_operators_equal_dtensors_own(tmp_path: Path):
    found = measured(tmp_path / "some.json", "", "--count", "3", "--orders", "60", "--only", *OPERATORS)
    assert found["against ours"] == []
    assert found["operators"] == found["operators that DTensor runs"] == len(OPERATORS)
    assert found["operators in which a move of ours ran"] == len(OPERATORS) and found["moves of ours"] > 300
    verdicts = found["verdicts"]
    assert verdicts["equal"] > 6 * verdicts["rounding"] and verdicts["equal"] > 150
    assert sum(verdicts.values()) == found["cases"] == 3 * 2 * len(OPERATORS) + 2 * 60


FAULTS = {
    "an element": ("differs", "values"),
    "a refusal": ("ours refuses", "call: ValueError: not today"),
    "a refusal on one rank": ("ours refuses", "call: ValueError: not here"),
    "a lost process": ("ours refuses", "exit status 7"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_ours_is_seen(name: str, tmp_path: Path):
    verdict, words = FAULTS[name]
    found = measured(tmp_path / "wrong.json", name, "--count", "2", "--orders", "0", "--only", "mm")
    against = found["against ours"]
    assert verdict in {row["verdict"] for row in against}
    assert any(words in line for row in against for line in row["lines"]), against
