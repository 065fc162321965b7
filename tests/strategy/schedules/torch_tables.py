"""The schedules of torch, made without a process group."""

from pathlib import Path
from typing import Any
from unittest import mock


def made(name: str, ranks: int, microbatches: int, chunks: int, defer: bool = False) -> Any:
    """An instance of a schedule class of torch over stages that are stood in for."""
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.distributed.pipelining.stage import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, ranks, None, chunks * ranks
    return get_schedule_class(name)([stage] * chunks, microbatches, defer_pp_recv=defer)


def written(name: str, ranks: int, microbatches: int, chunks: int, path: Path, defer: bool = False) -> list[Path]:
    """The files that torch writes of a schedule: with computations only, and with messages."""
    files = []
    for form in ("compute_only", "compute_comms"):
        files.append(path / f"{name}.{form}.csv")
        made(name, ranks, microbatches, chunks, defer)._dump_csv(files[-1], format=form)
    return files
