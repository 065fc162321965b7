"""Checkpoints resharded by several processes, which meet in the destination and nowhere else."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from interop.checkpoint_cases import CONFIG, plain, whole
from shardplan.errors import BackendError, LayoutError, ParseError, TimedOut
from shardplan.interop import safetensors
from shardplan.interop.checkpoint import reshard, sharing
from shardplan.interop.checkpoint.sharing import ProcessShare, assign_by_size, launched_share
from shardplan.movement.weights.weights import Weights

HF = Weights.load("hf-llama", CONFIG)
TO = Weights.load("megatron-llama", CONFIG, divisible=4, tensor=4, pipeline=3)
PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
ARGUMENTS = ["--from", "hf-llama", "--to", "megatron-llama,divisible=4,tensor=4,pipeline=3"]
MPIEXEC = Path(sys.executable).parent / "mpiexec"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(key, raising=False)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """What a test starts; killed by its own id where the test ends before it."""
    every: list[subprocess.Popen[str]] = []
    yield every
    for process in every:
        if process.poll() is None:
            process.kill()
        process.wait()


def start(
    started: list[subprocess.Popen[str]], source: Path, out: Path, rank: int, count: int, *more: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardplan", "reshard", str(source), str(out), *ARGUMENTS, *more]
    environment = os.environ | PATHS | {"RANK": str(rank), "WORLD_SIZE": str(count)}
    pipe = subprocess.PIPE
    started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))
    return started[-1]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """A source, and what one process makes of it."""
    source = plain(tmp_path / "hf")
    reshard(source, tmp_path / "alone", from_=HF, to=TO)
    return source, contents(tmp_path / "alone")


def test_files_are_dealt_by_bytes_and_alike_everywhere() -> None:
    rng = random.Random(0)
    for _ in range(50):
        sizes = [rng.randrange(1, 100) for _ in range(rng.randrange(1, 30))]
        count = rng.randrange(1, 6)
        owners = assign_by_size(sizes, count)
        load = [sum(s for s, o in zip(sizes, owners, strict=True) if o == p) for p in range(count)]
        assert owners == assign_by_size(list(sizes), count) and max(load) - min(load) <= max(sizes)


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ({"RANK": "2", "WORLD_SIZE": "8"}, ProcessShare(2, 8)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ProcessShare(1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, ProcessShare(3, 4)),
        ({"RANK": "2"}, ProcessShare(0, 1)),
    ],
)
def test_every_launcher_is_known_by_its_variables(said: dict[str, str], want: ProcessShare) -> None:
    assert launched_share(said) == want


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParseError) as error:
        launched_share({"RANK": "-1", "WORLD_SIZE": "2"})
    assert str(error.value) == "the launcher's variables RANK = '-1', WORLD_SIZE = '2'; legal are whole numbers"
    with pytest.raises(LayoutError, match="process 2 of 2; legal are 0 to 1"):
        reshard(plain(tmp_path / "hf"), tmp_path / "out", from_=HF, to=TO, process=(2, 2))


@pytest.mark.parametrize("count", [3])
def test_the_bytes_of_several_are_those_of_one(
    tmp_path: Path, made: tuple[Path, dict[str, bytes]], started: list[subprocess.Popen[str]], count: int
) -> None:
    source, want = made
    out = tmp_path / "out"
    every = [start(started, source, out, r, count, "--json", "--memory-limit", "14MB") for r in range(count)]
    said = [p.communicate(timeout=120) for p in every]
    assert [p.returncode for p in every] == [0] * count, said
    assert contents(out) == want
    assert [text for text, _ in said[1:]] == [""] * (count - 1)
    found = json.loads(said[0][0])
    assert found["processes"] == count and {f["process"] for f in found["files"]} == set(range(count))


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_a_real_launcher(tmp_path: Path, made: tuple[Path, dict[str, bytes]], launcher: str) -> None:
    if launcher == "torchrun":
        if importlib.util.find_spec("torch") is None:
            pytest.skip("no torch beside this Python")
        head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    elif MPIEXEC.exists():
        head = [str(MPIEXEC), "-n", "2", sys.executable]
    else:
        pytest.skip("no mpiexec beside this Python")
    source, want = made
    command = [*head, "-m", "shardplan", "reshard", str(source), str(tmp_path / "out"), *ARGUMENTS]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | PATHS, timeout=120)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == want
    assert done.stdout.count("processes   2, of") == 1, done.stdout


def test_killed_processes_are_followed_by_as_many_as_there_are(
    tmp_path: Path, made: tuple[Path, dict[str, bytes]], started: list[subprocess.Popen[str]]
) -> None:
    source, want = made
    out = tmp_path / "out"
    rng = random.Random(1)
    for count in (3, 2):
        every = [start(started, source, out, r, count) for r in range(count)]
        wanted, begun = len(list(out.glob("*.safetensors"))) + rng.randrange(1, 4), time.monotonic()
        while len(list(out.glob("*.safetensors"))) < wanted and time.monotonic() < begun + 60:
            time.sleep(0.002)
        for process in every:
            process.send_signal(signal.SIGKILL)
        codes = [process.wait() for process in every]
        assert set(codes) <= {0, -signal.SIGKILL}, f"a child itself failed, with status {codes}; it was not killed"
        for path in out.glob("*.safetensors"):
            assert path.read_bytes() == want[path.name]
    with pytest.raises(ParseError, match="is of a reshard that has not ended; legal is to end it first"):
        reshard(out, tmp_path / "next", to=HF)
    done = reshard(source, out, from_=HF, to=TO)
    assert contents(out) == want
    assert any(f.skipped for f in done.files)


def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    source, out = plain(tmp_path / "hf"), tmp_path / "out"
    with pytest.raises(TimedOut) as error:
        reshard(source, out, from_=HF, to=TO, process=(0, 2), timeout=0.3)
    assert str(error.value) == (
        f"reshard into {out}: process 1 of 2 did not come within 0.3 s; legal is the same call in all 2 processes that "
        "the launcher started, or process=(0, 1) in one alone"
    )
    assert not (out / "shardplan.json").exists() and not list(out.glob("*.safetensors"))
    reshard(source, out, from_=HF, to=TO)  # one alone goes on with what there is
    assert not list(out.glob("shardplan-process*"))


def test_a_process_that_does_not_come_after_the_check_is_named(tmp_path: Path) -> None:
    source, out = plain(tmp_path / "hf"), tmp_path / "out"
    with pytest.raises(TimedOut):
        reshard(source, out, from_=HF, to=TO, process=(0, 2), timeout=0.1)
    note = json.loads((out / "shardplan-process-00000.json").read_text()) | {"number": 1, "verified": True}
    (out / "shardplan-process-00001.json").write_text(json.dumps(note))  # of a process that has only verified
    with pytest.raises(TimedOut, match="process 1 of 2 did not come"):
        reshard(source, out, from_=HF, to=TO, process=(0, 2), timeout=0.3)
    assert len(list(out.glob("*.safetensors"))) == 6 and not (out / "shardplan.json").exists()


def test_what_another_process_finished_is_not_written_again(tmp_path: Path) -> None:
    test_a_process_that_does_not_come_after_the_check_is_named(tmp_path)
    done = reshard(tmp_path / "hf", tmp_path / "out", from_=HF, to=TO, process=(0, 1))
    assert sum(f.skipped for f in done.files) == 6 and not list((tmp_path / "out").glob("shardplan-process*"))


def test_a_process_that_stops_is_named(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    source, out = plain(tmp_path / "hf"), tmp_path / "out"
    late = start(started, source, out, 1, 2)
    while not (out / "shardplan-process-00001.json").exists() and late.poll() is None:
        time.sleep(0.01)
    first = start(started, source, out, 0, 2, "--timeout", "2")
    while not (out / "shardplan-process-00000.json").exists() and first.poll() is None:
        time.sleep(0.002)
    late.send_signal(signal.SIGSTOP)
    _, said = first.communicate(timeout=60)
    ended = first.returncode
    late.kill()
    if ended == 0:
        pytest.skip("the other process was done before it was stopped")
    assert ended == 4 and "process 1 of 2" in said, said
    assert not (out / "shardplan.json").exists()


def test_what_one_process_fails_of_the_others_say(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    source, held, out = plain(tmp_path / "hf"), tmp_path / "held", tmp_path / "out"
    reshard(source, held, from_=HF, to=TO)
    last = sorted(held.glob("*.safetensors"))[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    back = ["--to", "hf-llama"]
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "shardplan", "reshard", str(held), str(out), *back]
    for rank in range(2):
        environment = os.environ | PATHS | {"RANK": str(rank), "WORLD_SIZE": "2"}
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))
    said = [p.communicate(timeout=60)[1] for p in started]
    codes = [p.returncode for p in started]
    assert sorted(codes) == [2, 4], said
    own, other = codes.index(2), codes.index(4)
    assert f"{last} has" in said[own] and "are recorded; legal is the file that was written" in said[own]
    assert f"process {own} of 2 failed: {last} has" in said[other]
    assert not list(out.glob("*.safetensors"))


def test_a_process_that_failed_before_this_one_came_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = plain(tmp_path / "hf"), tmp_path / "out"
    with pytest.raises(TimedOut):
        reshard(source, out, from_=HF, to=TO, process=(0, 2), timeout=0.1)
    note = json.loads((out / "shardplan-process-00000.json").read_text()) | {"number": 1, "failed": "no disk"}
    (out / "shardplan-process-00001.json").write_text(json.dumps(note))
    monkeypatch.setattr(sharing, "GRACE", 0.3)  # in which it may come again
    begun = time.monotonic()
    with pytest.raises(BackendError, match="process 1 of 2 failed: no disk"):
        reshard(source, out, from_=HF, to=TO, process=(0, 2), timeout=60)
    assert 0.3 < time.monotonic() - begun < 30


def test_who_has_verified_is_late_to_complete(tmp_path: Path) -> None:
    first, second = (sharing.ProcessMeeting(tmp_path, ProcessShare(k, 2), "", 1.0) for k in range(2))
    late: list[tuple[list[int], list[int]]] = []
    for done in ((), ("verified",), ("verified", "complete")):
        for word in done:
            setattr(second.note, word, True)
        second.save()
        late.append((first.late_processes("verified"), first.late_processes("complete")))
    assert late == [([0, 1], [0, 1]), ([0], [0, 1]), ([0], [0])]


def test_processes_of_different_requests_are_refused(tmp_path: Path) -> None:
    source, out = plain(tmp_path / "hf"), tmp_path / "out"
    with pytest.raises(TimedOut):
        reshard(source, out, from_=HF, to=TO, process=(0, 2), timeout=0.1)
    with pytest.raises(LayoutError, match="is of another request"):
        reshard(source, out, from_=HF, to=HF, process=(1, 2), timeout=0.1)


def test_a_wrong_file_that_another_process_recorded_is_written_again(
    tmp_path: Path, made: tuple[Path, dict[str, bytes]], started: list[subprocess.Popen[str]]
) -> None:
    source, want = made
    out = tmp_path / "alone"
    path = sorted(out.glob("*.safetensors"))[3]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    every = [start(started, source, out, r, 2) for r in range(2)]
    said = [p.communicate(timeout=120)[1] for p in every]
    assert [p.returncode for p in every] == [0, 0], said
    assert contents(out) == want


def test_a_model_with_more_processes_than_files(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    source, out = plain(tmp_path / "hf"), tmp_path / "out"
    command = [sys.executable, "-m", "shardplan", "reshard", str(source), str(out), "--from", "hf-llama"]
    command += ["--to", "hf-llama"]
    for rank in range(2):
        environment = os.environ | PATHS | {"RANK": str(rank), "WORLD_SIZE": "2"}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, text=True))
    assert [p.wait(60) for p in started] == [0, 0]
    with safetensors.open(out / "model.safetensors") as file:
        assert all(file.read(name).tobytes() == a.tobytes() for name, a in whole().items())
