"""Fused programs and jobs on real processes: values, gradients and bytes are those of the unfused ones."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
with_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
# How often a fused operator runs on a rank in a run of the case: a product of two batches is two calls.
CALLS = {
    "experts": 1,
    "two experts a rank": 2,
    "layers": 3,
    "gemv": 1,
    "gemv in one shot": 1,
    "ulysses": 1,
    "bags": 1,
    "gathered rows": 1,
    "cut sums": 1,
    "dlrm step": 1,
    "llama decode": 6,
    "mixture step": 8,
    "dlrm job": 2,
}

# Whose other steps move, too.
UNLIKE = ("layers", "dlrm step", "llama decode", "mixture step", "dlrm job")


@with_torch
def test_fused_programs_and_jobs_on_processes() -> None:
    from execution.torch_launch import printed

    every = printed(4, HERE / "fused_child.py", seconds=240)
    assert [line for rank in every for case in rank.values() for line in case["wrong"]] == []
    assert set(every[0]) == set(CALLS)
    for name, calls in CALLS.items():
        here = [rank[name] for rank in every if rank[name]["calls"]]
        assert here and {case["calls"] for case in here} == {calls}, name
        for case in here:
            plain, fused = case["bytes"]
            assert case["moved"] > 0
            if name == "gemv in one shot":  # every rank gets all addends: more bytes, one latency
                assert (fused, case["moved"]) == ([3 * 72], 3 * 72)
            elif name == "gemv":  # 6 rows are 2, 2, 2 and 0 by owner, where an all-reduce cuts 18 elements
                assert fused == [case["moved"]]
            else:
                assert plain == fused, name
                assert case["moved"] == sum(fused) or name in UNLIKE
    plain, fused = (sum(sum(rank["gemv"]["bytes"][k]) for rank in every) for k in range(2))
    assert plain == fused
