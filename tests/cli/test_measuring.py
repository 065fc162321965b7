"""The command `measure`: constants that come of what was timed, and one clear line for every mistake."""

import json
from pathlib import Path

import pytest

from execution.torch_launch import printed, torchrun
from shardplan import Topology
from shardplan.cli import run_command
from shardplan.errors import ShardplanError
from shardplan.simulation.accuracy.machine_timings import (
    CollectiveTiming,
    KernelTiming,
    MachineTimings,
    collectives_beside,
    network_share,
    params_of_timings,
    product_shares,
)
from shardplan.simulation.closed.machines import parse_fit

CHILD = Path(__file__).parents[1] / "execution" / "machine_timings_child.py"
CORES = """
name = "cores"
library = "gloo"
[device]
flops = {{ f32 = "{flops}" }}
memory = "8 GB"
memory_bandwidth = "60 GB/s"
[[levels]]
name = "node"
size = {nodes}
link = "switch"
bandwidth = "2 GB/s"
latency = "50 us"
[[levels]]
name = "core"
size = 1
link = "switch"
bandwidth = "2 GB/s"
latency = "20 us"
"""


def cores(folder: Path, nodes: int = 2, flops: str = "9 TFLOP/s") -> Path:
    path = folder / "cores.toml"
    path.write_text(CORES.format(nodes=nodes, flops=flops))
    return path


def test_constants_are_those_of_the_timings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks make the calls, a stub says what they take; the file has the stub's constants, and plan uses them."""
    where, out = cores(tmp_path), tmp_path / "mine.toml"
    known = {"product": 0.5, "half": 128.0, "stream": 0.75, "attention": 0.2, "launch": 5e-6, "network": 0.4}
    found = printed(2, CHILD, where, json.dumps(known), out)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "message")
    assert found["ran"] == {"product": 12, "copy": 4, "attention": 2, "launch": 1} | dict.fromkeys(kinds, 3)
    assert found["lacking"] == [] and found["kept"] == ["eager"] and set(found["beside"]) == set(kinds)
    fit = parse_fit(out.read_text())
    assert {k: getattr(fit.parameters, k) for k in known} == pytest.approx(known, rel=1e-6)
    # The wall timer looks at its clock twice a call: one to connect, one to see how long it takes, three that count.
    # What the slowest rank takes is taken.
    assert found["timed"] == 2.0 and found["ticks"] == 2 * (1 + 1 + 3)

    seconds: list[float] = []
    mine = ["--params", str(out)]
    for flops, more in (("9 TFLOP/s", mine), ("4.5 TFLOP/s", mine), ("9 TFLOP/s", [])):
        arguments = ["plan", "gpt2,layers=2", "--on", str(cores(tmp_path, flops=flops)), "--batch", "8", *more]
        assert run_command([*arguments, "--precision", "fp32", "--json"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["answer"][0]["seconds"])
    assert len(set(seconds)) == 3 and seconds[0] < seconds[1]


def test_the_command_writes_what_plan_takes(tmp_path: Path) -> None:
    where, out = cores(tmp_path), tmp_path / "mine.toml"
    done = torchrun(2, "-m", "shardplan", "measure", "--on", str(where), "--out", str(out), "--seconds", "1", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    fit = parse_fit(out.read_text())
    assert told["parameters"]["product"] == fit.parameters.product > 0
    assert len(told["kernels"]) == 19 and len(told["collectives"]) == 18 and told["dtype"] == "f32"
    assert all(one["seconds"] > 0 for one in (*told["kernels"], *told["collectives"]))
    assert fit.names and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"out": "nowhere/mine.toml"}, "cannot write .*: there is no folder"),
        ({"on": "dgx-h1000"}, "topology 'dgx-h1000' is no preset"),
        ({"precision": "int3"}, "measure: --precision 'int3' is unknown; legal: fp32, bf16, fp16"),
        ({"on": "nominal"}, "measure: nominal states no flops of its device; legal is one that does"),
        ({}, "measure runs one process a device; legal is torchrun --nproc-per-node N"),
        ({"size": "8"}, r"measure: 8 processes on cores, which has 2 devices \(node=2 x core=1\)"),
    ],
)
def test_a_mistake_is_one_line(
    change: dict[str, str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / change.get("out", "mine.toml")
    monkeypatch.delenv("RANK", raising=False)
    if "size" in change:
        monkeypatch.setenv("WORLD_SIZE", change["size"])
    said = ["measure", "--on", change.get("on", str(cores(tmp_path))), "--out", str(out)]
    said += ["--precision", change["precision"]] if "precision" in change else []
    assert run_command(said) == 2
    found = capsys.readouterr().err.splitlines()
    assert len(found) == 1
    with pytest.raises(ShardplanError, match=text):
        raise ShardplanError(found[0])
    assert not out.exists()
    monkeypatch.setenv("RANK", "1")  # one rank says it; without any, every rank joins
    if change:
        assert run_command(said) == 2 and capsys.readouterr().err == ""


# The arithmetic


def timings(topology: Topology, product: float, half: float = 0.0, stream: float = 0.5) -> MachineTimings:
    peak, bandwidth = topology.device.peak("f32"), topology.device.memory_bandwidth
    kernels = [KernelTiming("copy", (n,), 2 * n / (bandwidth * stream)) for n in (1 << 20, 1 << 24)]
    for m in (1024, 2048, 4096):
        kernels.append(KernelTiming("product", (m, m, m), 2 * m**3 / (peak * product) * (1 + 3 * half / m)))
    return MachineTimings("f32", tuple(kernels))


def test_more_than_the_data_sheet_is_refused(tmp_path: Path) -> None:
    where = Topology.load(cores(tmp_path, flops="1 TFLOP/s"))
    with pytest.raises(
        ShardplanError, match=r"products reach 1.3 TFLOP/s, 1.3 times what cores states; legal is a flops"
    ):
        params_of_timings(timings(where, 1.3), where, "x")
    with pytest.raises(ShardplanError, match=r"copies reach 90 GB/s, 1.5 times what cores states; legal is a memory"):
        params_of_timings(timings(where, 0.5, stream=1.5), where, "x")


def test_what_no_product_reached_none_is_said_to_reach(tmp_path: Path) -> None:
    """Thin products that are slow enough would say that an endless one is above the peak."""
    where = Topology.load(cores(tmp_path, flops="1 TFLOP/s"))
    steep = timings(where, 1.01, half=64)
    product, half = product_shares(steep, where, 1.0)
    assert product == 1.0 and 32 < half < 64


def test_a_network_that_cannot_be_told_is_kept(tmp_path: Path) -> None:
    one = Topology.load(cores(tmp_path, nodes=1, flops="1 TFLOP/s"))
    found = params_of_timings(timings(one, 0.5), one, "x")
    assert {"network", "launch", "attention"} <= set(found.kept)
    assert network_share(MachineTimings("f32", (), (CollectiveTiming("all_reduce", 1 << 20, 1.0),)), one) is None


@pytest.mark.parametrize(("times", "share"), [(1e3, 0.05), (1e-3, 1.0)])
def test_a_share_stays_within_its_bounds(times: float, share: float, tmp_path: Path) -> None:
    where = Topology.load(cores(tmp_path))
    one = CollectiveTiming("all_reduce", 1 << 24, (1 << 24) / 2e9 * times)
    assert network_share(MachineTimings("f32", (), (one,)), where) == pytest.approx(share)


def test_all_gather_is_priced_by_what_a_member_holds(tmp_path: Path) -> None:
    """Of four members each sends its quarter on to three: three quarters of the bytes cross a link of 2 GB/s."""
    where = Topology.load(cores(tmp_path, nodes=4))
    one = CollectiveTiming("all_gather", 1 << 30, 0.75 * (1 << 30) / 2e9)
    assert collectives_beside(MachineTimings("f32", (), (one,)), where)["all_gather"] == pytest.approx(1.0, rel=1e-3)
