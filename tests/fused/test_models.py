"""Stock modules under torch.compile with the pass: what is fused fires, training is equal, the others have a reason."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from execution.torch_launch import printed

HERE = Path(__file__).parent
SUM, SENT = "gemv_all_reduce", "gemm_all_to_all"
# By case: forward, backward. A block's two row-wise products; backward the gradients of its column-wise ones.
ROWS = {
    "llama": ([f"{SUM} fused"] * 2, [f"{SUM} fused"] * 5),
    "mixture": ([f"{SENT} fused"], []),
    "llama, slow signals": ([f"{SUM} not_faster"] * 2, [f"{SUM} not_faster"] * 5),
}
STEPS = 3


@pytest.fixture(scope="module")
def every() -> list[dict[str, Any]]:
    return printed(2, HERE / "model_child.py", seconds=300)


@pytest.mark.parametrize("name", ROWS)
def test_stock_modules_train_equal_with_their_pairs_fused(name: str, every: list[dict[str, Any]]) -> None:
    """A block under `parallelize_module`, a mixture by functional collectives: losses and parameters of some steps."""
    for said in every:
        found = said[name]
        assert tuple(found["rows"]) == ROWS[name]
        assert found["away"] < 1e-5
        assert found["loss"][-1] < found["loss"][0]
        fused = sum(row.endswith(" fused") for rows in ROWS[name] for row in rows)
        assert found["ran"] == STEPS * fused
