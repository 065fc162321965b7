"""The example of live jobs in a small form: it compares with plain torch itself."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_sharded.py"


def test_a_llama_trains_in_shards_as_plain_torch_does(tmp_path: Path) -> None:
    """FSDP x tensor on parts of batches, saved, two pipeline stages, saved, decoded from that: 1e-9 throughout."""
    from execution.torch_launch import printed

    report = printed(4, EXAMPLE, 4, tmp_path)
    assert report["apart"] < 1e-9 and report["served_apart"] < 1e-9
    assert len(report["said"]) == 24 and report["last"] < report["first"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", "state.last"]
