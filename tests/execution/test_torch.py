"""The torch backend on real processes over gloo: conformance, memory, bytes on the wire, the command line."""

import json
from pathlib import Path

import pytest

import shardplan as sp
from execution.torch_launch import printed, torchrun
from shardplan.cli import run_command
from shardplan.simulation.timeline import load_timelines

pytest.importorskip("torch")
HERE = Path(__file__).parent


@pytest.mark.parametrize(("processes", "count"), [(2, 60), (4, 120), (6, 60)])
def test_every_program_equals_the_reference(processes: int, count: int) -> None:
    """Bit for bit, on a seeded sample; the bytes of every step are those of the op."""
    assert printed(processes, HERE / "torch_child.py", 7, count) == {"cases": count, "wrong": []}


def test_batched_messages_as_nccl_takes_them() -> None:
    assert printed(3, HERE / "torch_child.py", 8, 60, "batched") == {"cases": 60, "wrong": []}


@pytest.mark.parametrize(("processes", "count"), [(3, 40), (4, 100)])
def test_native_collectives_as_nccl_runs_them(processes: int, count: int) -> None:
    assert printed(processes, HERE / "torch_child.py", 8, count, "native") == {"cases": count, "wrong": []}


def test_what_reaches_process_groups() -> None:
    """Of each program the calls of rank 0 and of rank 3: ranks in member order and bytes given, worked out by hand."""
    found = printed(4, HERE / "torch_native_child.py", "gloo")
    every = [0, 1, 2, 3]
    wanted = {
        "gather": ([["allgather_base", [0, 1], 24]], [["allgather_base", [2, 3], 24]]),
        "gather of a minor dim, in two chunks": (
            [["allgather_base", [0, 1], 64]] * 2, [["allgather_base", [2, 3], 64]] * 2),
        "exchange of dims": ([["alltoall_base", [0, 2, 1, 3], 16]],) * 2,
        # slots of 16 rows of 5, of 3 of 3, of 4 of 5 for each member, and of 2 by 2
        "padded gather, padding behind the result": ([["allgather_base", every, 320]],) * 2,
        "padded gather, padding inside": ([["allgather_base", every, 36]],) * 2,
        "padded scatter": ([["reduce_scatter_base", every, 320]],) * 2,
        "padded exchange of dims": ([["alltoall_base", [0, 2, 1, 3], 32]],) * 2,
        "scatter": ([["reduce_scatter_base", every, 160]],) * 2,
        "reduce": ([["allreduce", [0, 2], 48]], [["allreduce", [1, 3], 48]]),
        "to a root and back": ([["reduce", every, 24], ["broadcast", every, 24]],) * 2,
        "packed, two widths": ([["allgather_base", every, 16], ["allgather_base", every, 1]],) * 2,
        "packed, in place": (
            [["allreduce", [0, 2], 32], ["allreduce", [0, 2], 24], ["broadcast", [0, 2], 32]],
            [["allreduce", [1, 3], 32], ["allreduce", [1, 3], 24], ["broadcast", [1, 3], 32]]),
        "beside another reduction": ([["allgather_base", [0, 2], 16]], [["allgather_base", [1, 3], 16]]),
        "an order of ranks": ([["allgather_base", [2, 0, 3, 1], 8]],) * 2,
        "uneven": (
            [["recv", every, n] for n in (8, 8, 4)] + [["send", every, 8]] * 3,
            [["recv", every, 8]] * 3 + [["send", every, 4]] * 3),
        # all parts come from the neighbour; what rank 0 passes on to rank 1 is its own, then those of 3 and 2
        "uneven, in a ring": (
            [["recv", every, n] for n in (4, 8, 8)] + [["send", every, n] for n in (8, 4, 8)],
            [["recv", every, 8]] * 3 + [["send", every, n] for n in (4, 8, 8)]),
        # half of all that a rank has to the nearest one, then a quarter of it to the other
        "even, by doubling": ([[way, every, n] for n in (32, 16) for way in ("recv", "send")],) * 2,
        # each reduces two of the eight numbers, and gives them to the others
        "of no library": (([["recv", every, 4]] * 3 + [["send", every, 4]] * 3) * 2,) * 2,
    }  # fmt: skip
    assert found.keys() == wanted.keys()
    for name, (first, last) in wanted.items():
        assert all(right for right, _ in found[name]), name
        for rank, calls in ((0, first), (3, last)):
            assert found[name][rank][1] == calls, (name, rank)


@pytest.mark.parametrize("way", ["", "gloo"])
def test_a_process_group_of_its_own(way: str) -> None:
    """Moves of several groups are under way at once, and end in whatever order on each rank."""
    assert printed(4, HERE / "torch_group_child.py", way) == {"wrong": []}


@pytest.mark.gpu
def test_every_program_equals_the_reference_on_nccl() -> None:
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip(f"nccl wants a GPU a rank, and at least 2; here are {gpus}")
    done = torchrun(2, str(HERE / "torch_child.py"), "7", "100", "nccl")  # CUDA may not be forked
    assert done.returncode == 0, done.stderr[:4000]
    assert json.loads(done.stdout[done.stdout.index("{") :]) == {"cases": 100, "wrong": []}


def test_memory_is_within_the_certificate() -> None:
    for way in ("", "gloo"):  # point-to-point, and the library's own collectives
        found = printed(4, HERE / "torch_memory_child.py", 3, 60, way)
        assert found["wrong"] == [], way
        assert found["chunked"] >= 10
        assert 0.5 < found["least"] <= 1.0


def test_the_kernel_counts_the_bytes_of_the_program() -> None:
    rows = printed(4, HERE / "torch_wire_child.py")
    assert len(rows) == 12
    for row in rows:
        for said, counted in zip(row["said"], row["counted"], strict=True):
            assert said <= counted <= said * 1.005 + 16384, row


def test_run_under_torchrun_says_what_was_predicted_and_measured(tmp_path: Path) -> None:
    mesh = sp.Mesh(a=2)
    s, t = (sp.TensorType.parse(x, mesh) for x in ("f32[64@a, 64]", "f32[64, 64@a]"))
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    sp.redistribute(s, t).save(plan)
    command = ("-m", "shardplan", "run", str(plan), "--backend", "torch")
    done = torchrun(2, *command, "--topology", "nominal", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    assert "ok: every shard of this process (1) equals the reference's" in done.stdout
    assert "all_to_all(%0; src_dim=0, dst_dim=1, axes=(a))" in done.stdout
    assert done.stdout.count("makespan") == 1
    assert "predicted on nominal: device=8, 50 GB/s, 5 us between devices" in done.stdout
    predicted, measured = load_timelines(trace)
    assert (predicted.source, measured.source) == ("predicted", "measured")
    assert [i.device for i in measured.intervals] in ([0, 1], [1, 0])
    assert [i.received_bytes for i in measured.intervals] == [i.received_bytes for i in predicted.intervals]
    told = torchrun(2, *command, "--topology", "nominal", "--json")
    found = json.loads(told.stdout)
    assert found["ok"] is True
    assert found["seconds"] > 0
    assert found["predicted_seconds"] == pytest.approx(predicted.seconds, rel=1e-3)


def test_run_predicts_for_the_links_that_there_are(tmp_path: Path) -> None:
    """8 MiB between two processes: the nominal switch of 50 GB/s would be off by hundreds; what is measured is not."""
    plan = tmp_path / "plan.json"
    mesh = sp.Mesh(a=2)
    sp.redistribute(*(sp.TensorType.parse(x, mesh) for x in ("f32[2048@a, 2048]", "f32[2048, 2048@a]"))).save(plan)
    done = torchrun(2, "-m", "shardplan", "run", str(plan), "--backend", "torch", "--json")
    found = json.loads(done.stdout)
    links = sp.Topology.parse(found["predicted_on"])
    assert (links.name, links.describe()) == ("measured links", "device=2")
    assert 1e6 < links.levels[0].bandwidth < 2e10 and 1e-7 < links.levels[0].latency < 1
    # What is received over the bandwidth, and the latency of one message.
    least = 2048 * 2048 * 4 / 4 / links.levels[0].bandwidth + links.levels[0].latency
    assert found["predicted_seconds"] == pytest.approx(least)
    assert found["predicted_seconds"] / 100 < found["seconds"] < found["predicted_seconds"] * 100


def test_run_without_a_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    mesh = sp.Mesh(a=2)
    plan = tmp_path / "plan.json"
    sp.redistribute(*(sp.TensorType.parse(x, mesh) for x in ("f32[4@a]", "f32[4]"))).save(plan)
    assert run_command(["run", str(plan), "--backend", "torch"]) == 2
    assert capsys.readouterr().err == (
        "shardplan: the backend torch runs one process a device: "
        "torchrun --nproc-per-node N --no-python shardplan run ...\n"
    )
    assert run_command(["run", str(plan), "--trace", str(tmp_path / "t.json")]) == 2
    assert capsys.readouterr().err == (
        "shardplan: --trace writes what a real run took; the reference has no time: give --backend torch, jax or mpi\n"
    )
    with pytest.raises(
        sp.BackendError, match=r"^torch\.distributed is not initialised: launch with torchrun and call "
    ):
        sp.run(sp.Plan.load(plan).program, [], backend="torch")
    for timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(sp.BackendError, match=r"^timeout=.*; legal is a positive number of seconds$"):
            sp.run(sp.Plan.load(plan).program, [], timeout=timeout)
