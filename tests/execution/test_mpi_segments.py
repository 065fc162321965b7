"""The names of MPICH's shared memory: only of what this process has mapped, and only while they are still its own."""

import mmap
import os
from pathlib import Path

import pytest

from shardplan.execution.mpi.world import unname

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of what a process has mapped")


def segment(path: Path) -> Path:
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


def mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def test_a_mapped_segment_loses_its_name_and_keeps_its_memory(tmp_path: Path) -> None:
    mine, theirs, unlike = (segment(tmp_path / name) for name in ("job_1", "job_2", "else_1"))
    with mapped(mine) as memory, mapped(unlike):
        memory[0] = 7
        assert unname(str(tmp_path / "job_")) == [str(mine)]
        assert unname(str(tmp_path / "job_")) == []  # of the ranks of a machine, each does it
        assert memory[0] == 7
        assert sorted(os.listdir(tmp_path)) == ["else_1", "job_2"]
    assert theirs.exists()


def test_a_name_that_another_job_has_taken_stays(tmp_path: Path) -> None:
    name = segment(tmp_path / "job_1")
    with mapped(name):
        name.unlink()
        (tmp_path / "new").write_bytes(b"another job's")
        os.rename(tmp_path / "new", name)
        listed = Path("/proc/self/maps").read_text().replace(" (deleted)", "")  # as it was read a moment before
        (tmp_path / "maps").write_text(listed)
        assert unname(str(tmp_path / "job_"), tmp_path / "maps") == []
        assert unname(str(tmp_path / "job_")) == []
    assert name.read_bytes() == b"another job's"


def test_elsewhere_nothing_is_done(tmp_path: Path) -> None:
    assert unname(maps=tmp_path / "none") == []
