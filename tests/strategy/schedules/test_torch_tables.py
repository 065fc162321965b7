"""Torch's own schedules: read, written back byte by byte, checked, replayed and compared with ours."""

from pathlib import Path

import pytest

from shardplan.strategy.schedules import Schedule, Times, broken_law, replay, schedule
from strategy.schedules.torch_tables import made, written

pytest.importorskip("torch")

# torch's name, chunks, our name (None: we have no such schedule), sizes
TABLES = (
    ("Interleaved1F1B", 2, "interleaved"),
    ("Interleaved1F1B", 3, "interleaved"),
    ("LoopedBFS", 2, "looped-bfs"),
    ("InterleavedZeroBubble", 1, "zb-h1"),
    ("InterleavedZeroBubble", 2, None),
    ("ZBVZeroBubble", 2, "zb-v"),
    ("DualPipeV", 2, "dualpipev"),
)


@pytest.mark.parametrize(("name", "chunks", "ours"), TABLES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 12), (4, 10)])
def test_tables(name: str, chunks: int, ours: str | None, ranks: int, microbatches: int, tmp_path: Path) -> None:
    for path in written(name, ranks, microbatches, chunks, tmp_path):
        read = Schedule.from_csv(path)
        read.to_csv(tmp_path / "again.csv")
        assert (tmp_path / "again.csv").read_bytes() == path.read_bytes()
        assert broken_law(read) is None
        if ours is not None:
            mine = schedule(ours, ranks, microbatches, chunks)
            assert read.compute_only() == mine
            assert replay(read.compute_only(), Times(2, 3, 1)).spans == replay(mine, Times(2, 3, 1)).spans


def test_torch_reads_ours(tmp_path: Path) -> None:
    schedule("zb-v", 4, 8).to_csv(tmp_path / "zbv.csv")
    read = made("ZBVZeroBubble", 4, 8, 2)
    read._load_csv(tmp_path / "zbv.csv")
    read._dump_csv(tmp_path / "with.csv", format="compute_comms")
    assert Schedule.from_csv(tmp_path / "with.csv").compute_only() == schedule("zb-v", 4, 8)


def test_the_single_stage_schedules_of_torch() -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for theirs, ours in (("GPipe", "gpipe"), ("1F1B", "1f1b")):
        rows = get_schedule_ops(theirs, 4, 8)
        text = [" ".join(str(a) for a in row if a is not None and "REDUCE" not in str(a)) for row in rows]
        # The last rank of torch's drawing of 1F1B begins with microbatch 1 and ends with one that is not there.
        kept = 4 if ours == "gpipe" else 3
        assert [" ".join(map(str, row)) for row in schedule(ours, 4, 8).ranks[:kept]] == text[:kept]
