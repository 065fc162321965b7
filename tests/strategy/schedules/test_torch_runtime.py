"""Schedules with our messages run in torch's own schedule runtime, on processes, and give the gradients."""

from pathlib import Path

import pytest

from execution.torch_launch import printed
from shardplan.strategy.schedules import Shop, Times, list_schedule, place_messages, schedule

pytest.importorskip("torch")

CHILD = Path(__file__).with_name("torch_pipeline_child.py")


def test_gradients_of_placed_schedules_in_torchs_runtime(tmp_path: Path) -> None:
    names = ("1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "v-half", "dualpipev")
    made = [schedule(name, 2, 4) for name in names]
    made.append(list_schedule(Shop((0, 1, 0, 1), 4, ((1, 2, 1), (3, 1, 1), (1, 1, 2), (2, 2, 2)), (5, 4)), 200))
    paths = [tmp_path / f"{k}.csv" for k in range(len(made))]
    for path, found in zip(paths, made, strict=True):
        place_messages(found, Times(2, 3, 1), 0.25).to_csv(path)
    worst = printed(2, CHILD, *paths)
    assert len(worst) == len(made) and max(worst) < 1e-12
