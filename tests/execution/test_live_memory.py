"""What a live job holds on the reference, by tracemalloc, beside its certificate: `benchmarks.memory_runs` in small."""

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from benchmarks.common import RESULTS

import shardplan as sp
from benchmarks import live_memory
from shardplan.execution.job_arrays import batch_dim
from shardplan.execution.live import Live
from shardplan.interop.checkpoint.job_state import write_state
from shardplan.strategy.partition.memory import certify


def held_bytes(**sizes: Any) -> tuple[int, int]:
    """The peak of two steps of AdamW on one device, from where the state is laid out on, and what is certified."""
    model = sp.Model.load("llama", **sizes, optimizer="adamw")
    job = sp.partition(model, sp.Strategy())
    live = Live(job, "reference", write_state)
    batch = {n: np.zeros(model.program.types[n].shape, np.int32) for n in job.batch if n in model.dims}
    assert all(x.shape[batch_dim(job, n)] == 1 for n, x in batch.items())

    def source(name: str, t: sp.TensorType, box: tuple[tuple[int, int], ...]) -> np.ndarray:
        return np.zeros([b - a for a, b in box], np.float32 if t.dtype == "f32" else np.int32)

    tracemalloc.start()
    live.lay_out(lambda: source)
    for _ in range(2):
        live.step(batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, max(certify(job).peak_bytes)


def test_an_update_holds_no_more_than_what_it_replaces() -> None:
    """A vocabulary of 16 MiB. Certificates take an update as in place: here its three results come beside it, once."""
    peak, certified = held_bytes(layers=1, hidden=256, heads=4, kv_heads=4, ffn=512, seq=64, vocab=16384)
    assert certified <= peak <= certified + 3 * 2**24 + 2**22


def test_what_layers_save_is_there_once() -> None:
    """Eight layers, whose saved values are most of it: no stack of them is made beside the rows that it has."""
    peak, certified = held_bytes(layers=8, hidden=128, heads=2, kv_heads=2, ffn=512, seq=512, vocab=256)
    assert certified <= peak <= 1.2 * certified


def test_the_benchmark_says_whether_the_law_holds(tmp_path: Path) -> None:
    certificate: Any = SimpleNamespace(peak_bytes=(2**30, 2**29), state_bytes=(2**28,), axis_bytes={("data",): 1000})
    for over, holds in ((0, True), (2**20, False)):
        peaks = (2**29, int(live_memory.SHARE * 2**30) + live_memory.BESIDE + over)
        told: list[dict[str, float]] = [
            {"rank": k, "peak bytes": p, "received bytes": 990} for k, p in enumerate(peaks)
        ]
        live_memory.summarize(2, tmp_path / "out.json", certificate, told, [2.0, 1.0])
        found = json.loads((tmp_path / "out.json").read_text())
        assert found["law holds"] is holds
        assert [row["received of the account"] for row in found["ranks"]] == [0.99, 0.99]


def test_the_committed_figures_keep_the_law() -> None:
    found = json.loads((RESULTS / "live_memory.json").read_text())
    assert found["law holds"] and found["certificate bytes"] >= 500 * 2**20
    assert all(abs(row["received of the account"] - 1) < 0.01 for row in found["ranks"])
