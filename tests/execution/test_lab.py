"""The lab: bytes on every edge, exact results, and nothing left behind; never times."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks.lab_kill import alive

import shardplan as sp
from conformance import cases
from execution.lab_here import needs_lab
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Op, Reduce, ReduceScatter
from shardplan.core.pattern import Groups
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.errors import Infeasible, ParseError, TopologyError
from shardplan.execution.lab import (
    ENGINES,
    Cluster,
    Lab,
    Measurement,
    Task,
    Unavailable,
    measure,
    missing,
    needs,
    session,
)
from shardplan.execution.lab.cluster import Leaf
from shardplan.execution.record import NativeCall
from shardplan.hardware.level import Level
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology
from shardplan.interop.hlo import hlo_script, parse_hlo
from shardplan.simulation.script import Script
from shardplan.simulation.scripts import Engine, script_of
from strangers import listening

HERE = Path(__file__).parent
FAST = (1000.0, 4000.0)  # Mbit/s: the tests ask for bytes, not for times
LATE = 5.0  # seconds: a busy machine does not fail these tests
TRIES = 10  # measurements of one item, where TCP sends again
MESH = sp.Mesh(data=2, tensor=4)


def program(text: str, op: Op, mesh: sp.Mesh = MESH) -> Program:
    return Program({"0": sp.TensorType.parse(text, mesh)}, [Step(op, ("0",), ("1",))], ("1",))


LARGE = {
    "all_reduce over tensor": program("i32[1024, 256]{+tensor}", AllReduce(("tensor",))),
    "all_reduce over data": program("f32[1024, 256]{+data}", AllReduce(("data",))),
    "all_reduce over both": program("f32[1024, 256]{+data,+tensor}", AllReduce(("data", "tensor"))),
    "all_reduce, tensor major": program("f32[1024, 256]{+data,+tensor}", AllReduce(("tensor", "data"))),
    "reduce_scatter": program("i32[1024, 256]{+data,+tensor}", ReduceScatter(1, ("data", "tensor"))),
    "all_gather": program("i32[1024@data, 256@tensor]", AllGather((1, 0), ("tensor", "data"))),
    "all_to_all": program("i32[1024@(data,tensor), 256]", AllToAll(0, 1, ("data", "tensor"))),
    "reduce": program("i32[1024, 256]{+data,+tensor}", Reduce(("data", "tensor"))),
    "broadcast": program("i32[1024, 256]{root:tensor,data}", Broadcast(("data", "tensor"))),
}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(Cluster.of("2x4", FAST), most_late=LATE) as running:
        yield running


def sent_again(lab: Lab) -> int:
    """The segments that TCP has sent again so far, in the namespaces of all ranks."""
    assert lab._process is not None
    tables = {os.readlink(f"/proc/{p}/ns/net"): Path(f"/proc/{p}/net/snmp") for p in children(lab._process.pid)}
    rows = ([line.split() for line in t.read_text().splitlines() if line.startswith("Tcp:")] for t in tables.values())
    return sum(int(dict(zip(*row, strict=True))["RetransSegs"]) for row in rows)


def seen(m: Measurement) -> list[tuple[str, int, int, float]]:
    """Of each edge: its name, the bytes that are predicted, those that the kernel saw, and the most that are right."""
    least = [min(r.edge_bytes[k] for r in m.repetitions) for k in range(len(m.edges))]  # of some a packet was lost
    most = max(m.predicted_edge_bytes)
    return [
        # acknowledgements of what goes the other way are headers, too
        (edge, said, kernel, 1.05 * said + 0.02 * most)
        for edge, said, kernel in zip(m.edges, m.predicted_edge_bytes, least, strict=True)
    ]


def measured(lab: Lab, item: Task | Program | Script, repetitions: int, engine: Engine = "ring") -> Measurement:
    """An item measured: anew where the kernel saw too many bytes, and TCP had sent some of them again.

    On a loaded machine an acknowledgement comes late, and what it is for is taken as lost.
    """
    for _ in range(TRIES):
        before = sent_again(lab)
        (found,) = lab.measure([item], repetitions, engine=engine)
        if sent_again(lab) == before or all(kernel <= most for _, _, kernel, most in seen(found)):
            break
    return found


def counted(m: Measurement) -> None:
    """The engine's count is the prediction, and what the kernel saw on each edge is that and a little more."""
    assert m.exact or m.calls
    assert m.calls or m.payload_edge_bytes == m.predicted_edge_bytes
    for edge, said, kernel, most in seen(m):
        assert said <= kernel <= most, (m.title, edge, said, kernel)


@needs_lab
def test_every_byte_of_large_collectives(lab: Lab) -> None:
    found = [measured(lab, Task(p, title=name), 3) for name, p in LARGE.items()]
    assert [m.title for m in found] == list(LARGE)
    for m in found:
        counted(m)
        assert m.engine == "ring"
        assert m.verified
        assert m.timeline.source == "measured"
        assert set(m.timeline.devices) == set(range(8))
        assert 0 < m.min_seconds <= m.seconds
        assert len(m.repetitions) == 3
    across = {m.title: m.predicted_edge_bytes[m.edges.index("node[0] up")] for m in found}
    # 1 MiB shards: 4 groups each move one shard over the node's link; one ring of 8 crosses it once a round
    assert across["all_reduce over tensor"] == 0
    assert across["all_reduce over data"] == 4 * 2**20
    assert across["all_reduce over both"] == 14 * 2**20 // 8
    assert across["all_reduce, tensor major"] == 4 * across["all_reduce over both"]


@needs_lab
@pytest.mark.parametrize("sizes", ["2x2", "2x4"])
def test_every_program_equals_the_reference(sizes: str, lab: Lab) -> None:
    """The conformance suite of the backends, on all engines: results bit for bit, bytes as predicted."""
    if sizes == "2x4":
        checked(lab, 60, 8)
        return
    with Lab(Cluster.of(sizes, FAST, "lo"), most_late=LATE) as other:
        checked(other, 40, 4)


def checked(lab: Lab, count: int, devices: int) -> None:
    for seed, engine in enumerate(ENGINES):
        drawn = list(cases(11 + seed, count if engine == "ring" else count // 2, devices))
        tasks = [Task(c.program, title=c.name) for c in drawn]
        found = lab.measure(tasks, 1, engine=engine)
        for case, m in zip(drawn, found, strict=True):
            assert m.verified and m.engine == engine
            assert m.exact or m.calls, f"{engine}: {case.name}\n{case.program}"
            assert {d for pair in m.payload for d in pair} <= set(case.program.devices)
        assert any(m.calls for m in found) == (engine == "gloo")


@needs_lab
def test_gloo_s_own_collectives(lab: Lab) -> None:
    """One call a device: in its group, in member order, with all it has; the bytes on every edge are those said."""
    for name, p in LARGE.items():
        m = measured(lab, Task(p, title=name), 1, "gloo")
        counted(m)
        assert m.verified and m.exact is None and not m.payload
        pattern = p.steps[0].op.pattern(*p.input_types)
        assert isinstance(pattern, Groups)
        rows = zip(pattern.members.tolist(), pattern.nbytes.tolist(), strict=True)
        want = {d: (NativeCall(pattern.kind, tuple(group), int(n)),) for group, n in rows for d in group}
        assert m.calls == want, name
    words = program("u16[8]{+data}", AllReduce(("data",)))  # which gloo does not add
    (foreign,) = lab.measure([words], 1, engine="gloo")
    assert foreign.exact and not foreign.calls and foreign.payload


@needs_lab
def test_a_placement_says_which_links_are_used(lab: Lab) -> None:
    topology = lab.cluster.topology
    p = program("i32[1024, 64]{+data}", AllReduce(("data",)))
    near, far = Placement(MESH, topology, ((1, 2), (2, 2))), Placement(MESH, topology, ((2, 1), (1, 4)))
    inside, outside = (measured(lab, Task(p, where), 1) for where in (near, far))
    counted(inside)
    counted(outside)
    up = inside.edges.index("node[0] up")
    assert inside.payload_edge_bytes[up] == 0
    assert outside.payload_edge_bytes[up] == 4 * 2**18
    assert inside.payload == outside.payload  # by device id
    three = Topology("", (Level("node", 8, "switch", 1e9, 0.0),))
    with pytest.raises(TopologyError, match=r"^the placement is on node=8, but the lab's cluster is node=2 x rank=4$"):
        lab.measure([Task(p, Placement(MESH, three, ((2,), (4,))))])
    with pytest.raises(TopologyError, match="device 8 is not on the topology"):
        lab.measure([program("i32[4]{+x}", AllReduce(("x",)), sp.Mesh({"x": 2}, devices=(0, 8)))])


@needs_lab
def test_a_script_is_replayed_byte_for_byte(lab: Lab) -> None:
    own = [script_of(p, name) for name, p in LARGE.items()]
    text = {f.stem: f.read_text() for f in sorted((HERE.parent / "interop" / "hlo").glob("*.txt"))}
    parsed = {f"hlo {name}": parse_hlo(t, 8) for name, t in text.items()}
    small = [hlo_script(found, name) for name, found in parsed.items()]
    found = [*(measured(lab, script, 1) for script in own), *lab.measure(small, 1)]
    for script, m in zip([*own, *small], found, strict=True):
        assert m.engine == "replay"
        assert not m.verified
        assert m.title == script.title
        assert m.payload == script.payload()
        if m.title in parsed:
            assert sum(m.payload.values()) == sum(c.moved_bytes for c in parsed[m.title])
        else:
            counted(m)
    assert [s.payload() for s in own] == [script_of(p).payload() for p in LARGE.values()]


@needs_lab
@pytest.mark.parametrize("sizes", ["2x2x2"])
def test_depth_and_the_short_way(sizes: str) -> None:
    p = program("i32[1024, 64]{+data,+tensor}", AllReduce(("data", "tensor")))
    tl = measure(p, Cluster.of(sizes, (1000, 2000, 4000)), repetitions=2)
    assert tl.source == "measured"
    assert {i.received_bytes for i in tl.intervals} == {2 * 7 * 2**18 // 8}


@needs_lab
@pytest.mark.parametrize("mutation", ["drop", "swap", "twice"])
def test_broken_engines_are_caught(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "HOST", (str(HERE / "lab_mutant.py"), mutation))
    x = sp.Mesh(x=4)
    gather = program("i32[1024@x, 64]", AllGather(0, ("x",)), x)
    reduce = program("i32[1024, 64]{+x}", AllReduce(("x",)), x)

    def caught(lab: Lab, p: Program) -> bool:
        try:
            (m,) = lab.measure([p], 1)
        except sp.BackendError as error:
            assert "the reference" in str(error)
            return True
        return m.payload != m.predicted_payload or m.payload_edge_bytes != m.predicted_edge_bytes

    with Lab(Cluster.of("2x2", FAST), most_late=LATE) as lab:
        found = caught(lab, gather), caught(lab, reduce)
    assert found == {"twice": (False, True)}.get(mutation, (True, True))


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    try:
        found = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:
        return []
    return [*found, *(d for c in found for d in children(c))]


def spaces(pids: list[int]) -> set[str]:
    out: set[str] = set()
    for pid in pids:
        try:
            out.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    return out


def everywhere() -> set[str]:
    return spaces([int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()])


def gone_within(seconds: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@needs_lab
@pytest.mark.parametrize("victim", ["session", "host", "unshare"])
def test_a_kill_leaves_nothing(victim: str) -> None:
    paths = os.pathsep.join(map(str, (HERE.parents[1] / "src", HERE.parents[1], HERE.parent)))
    before = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    child = subprocess.Popen(
        [sys.executable, str(HERE / "lab_session_child.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": paths},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"moving\n"
        below = children(child.pid)
        assert len(below) == 2 + 4  # unshare, the host, four ranks
        made = spaces(below) - spaces([child.pid])
        assert len(made) == 5  # the host's, and one a rank
        os.kill({"session": child.pid, "unshare": below[0], "host": below[1]}[victim], signal.SIGKILL)
        assert gone_within(60.0, lambda: not any(Path(f"/proc/{p}").exists() and alive(p) for p in below[1:]))
        assert gone_within(60.0, lambda: not made & everywhere())
        assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout == before
    finally:
        child.kill()
        child.wait(10)
        child.stdout.close()


@needs_lab
@pytest.mark.parametrize("when", ["it is being lost", "it is gone"])
def test_a_lost_rank_is_one_clear_error(when: str) -> None:
    with Lab(Cluster.of("2x2", FAST), timeout=5.0, most_late=LATE) as lab:
        assert lab._process is not None
        ranks = children(lab._process.pid)[1:]
        assert len(ranks) == 4
        os.kill(ranks[2], signal.SIGKILL)
        while when == "it is gone" and alive(ranks[2]):
            time.sleep(0.01)
        with pytest.raises(sp.BackendError, match=r"rank 2"):
            lab.measure([program("i32[64]{+x}", AllReduce(("x",)), sp.Mesh(x=4))])
        with pytest.raises(sp.BackendError, match=r"^the lab is not running; use it as a context manager"):
            lab.measure([program("i32[64]{+x}", AllReduce(("x",)), sp.Mesh(x=4))])


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs._try_namespaces.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert missing().startswith("the lab needs Linux (network namespaces), this is darwin; run it in ")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"bin/{tool}")
        assert missing() == "the lab needs the command 'tc', which is not installed; install the package iproute2"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda tool: f"bin/{tool}")
        patch.setattr("importlib.util.find_spec", lambda name: None)
        assert missing().endswith("torch is not installed; install shardplan[torch]")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda tool: f"bin/{tool}")
        refused = "echo 'unshare failed: Operation not permitted' >&2; exit 1"
        patch.setattr(needs, "namespace_command", lambda: ["sh", "-c", refused])
        assert "needs the privilege to make namespaces, which is refused (unshare failed: Oper" in missing()
        with pytest.raises(Unavailable, match=r"CAP_NET_ADMIN|unprivileged user namespaces"):
            Lab(Cluster.of("2", (1,))).__enter__()
        patch.setattr(
            needs, "namespace_command", lambda: ["sh", "-c", "echo 'the shaper tbf'; echo no tbf >&2; exit 2"]
        )
        assert missing() == (
            "the lab needs the shaper tbf, which this machine refuses (no tbf); load the module, or run as root"
        )
    assert issubclass(Unavailable, Infeasible)  # which the command line maps to status 3
    needs._try_namespaces.cache_clear()


def test_the_lab_is_imported_without_torch() -> None:
    line = "import sys, shardplan.execution.lab; sys.exit('torch' in sys.modules)"
    paths = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src")}
    assert subprocess.run([sys.executable, "-c", line], env=paths, timeout=60).returncode == 0


def test_what_is_no_cluster_is_refused() -> None:
    ring = Topology("", (Level("node", 2, "ring", 1e9, 0.0), Level("gpu", 2, "switch", 1e9, 0.0)))
    with pytest.raises(TopologyError, match=r"^level 'node' is a ring; a tree of links has switches only, since on "):
        Cluster(ring)
    with pytest.raises(TopologyError, match=r"^level 'node' has 8 uplinks; where the devices of a node share one "):
        Cluster(Topology.load("dgx-a100", nodes=2), "lo")
    with pytest.raises(ParseError, match=r"^rate '4x50'; legal is a number in Mbit/s, or uplinks and a number, such"):
        Cluster.of("2x4", ("4x50", 100))
    with pytest.raises(TopologyError, match=r"^cluster '2x4' has 2 levels, but 1 rates are given: 5; one a level, in "):
        Cluster.of("2x4", (5,))
    with pytest.raises(ParseError, match=r"^cluster '2y4'; legal are sizes, outermost first, such as '2x4'$"):
        Cluster.of("2y4", (5, 5))
    with pytest.raises(TopologyError, match=r"^leaf='vm'; legal are ns, lo$"):
        Cluster.of("2x4", (5, 5), "vm")  # pyright: ignore
    with pytest.raises(sp.BackendError, match=r"^engine='mpi'; legal are ring, tree, direct, gloo$"):
        Lab(Cluster.of("2", (5,)), engine="mpi")  # pyright: ignore
    with pytest.raises(sp.BackendError, match=r"^timeout=0; legal is a positive number of seconds$"):
        Lab(Cluster.of("2", (5,)), timeout=0)


def crossed(cluster: Cluster, sender: int, receiver: int) -> list[tuple[str, str]]:
    """The namespaces and interfaces by which a packet of one rank to another leaves, as the kernel looks routes up."""
    commands = {(tool, space): batch.splitlines() for tool, space, batch in cluster.commands()}
    peers: dict[tuple[str, str], str] = {}
    for words in (line.split() for line in commands["ip", ""]):
        if words[:2] == ["link", "add"]:  # link add name X address A netns S type veth peer name Y address A netns T
            peers[words[7], words[3]], peers[words[16], words[12]] = words[16], words[7]

    def address(rank: int) -> str:
        (own,) = (line.split()[2] for line in commands["ip", cluster.home(rank)] if line.startswith("addr add"))
        return own.removesuffix("/16")

    space, found = cluster.home(sender), [(cluster.home(sender), "up")]
    while (space := peers[found[-1]]) != cluster.home(receiver):
        lines = [line.split() for line in commands["ip", space]]
        inside = [w[4] for w in lines if w[:3] == ["route", "add", f"{address(receiver)}/32"]]
        tables = [w[5] for w in lines if w[:4] == ["rule", "add", "from", f"{address(sender)}/32"]]
        outside = [w[4] for w in lines if w[:3] == ["route", "replace", "default"] and w[6:7] == tables[:1]]
        assert len(set(inside or outside)) == 1, (space, inside, outside)
        found.append((space, (inside or outside)[0]))
    return found


@pytest.mark.parametrize(
    ("sizes", "rates", "leaf"),
    [
        ("2x4", ("4*5", 9), "ns"),
        ("2x2x3", ("2*5", "6*4", 9), "ns"),
        ("2x2x2", ("3*5", 4, "2*9"), "ns"),
        ("3x2", (7, 9), "lo"),
    ],
)
def test_packets_take_the_links_of_the_tree(sizes: str, rates: tuple[float | str, ...], leaf: Leaf) -> None:
    """Out of a unit by the rail of the sender, into one by that of the receiver."""
    cluster = Cluster.of(sizes, rates, leaf)
    meters = cluster.meters()
    for a, b in itertools.permutations(range(cluster.ranks), 2):
        if cluster.home(a) != cluster.home(b):
            assert crossed(cluster, a, b) == [meters[k] for k in cluster.tree.path(a, b)]


@needs_lab
def test_every_byte_takes_its_own_uplink() -> None:
    """The bytes of every link of every unit, as the kernel counts them."""
    with Lab(Cluster.of("2x4", ("2*500", 2000)), most_late=LATE) as lab:
        for name in ("all_reduce over data", "all_reduce over both"):
            m = measured(lab, Task(LARGE[name], title=name), 2)
            counted(m)
            assert m.verified
    assert {"node[0].0 up", "node[0].1 up", "node[1].1 down"} <= set(m.edges)


def test_the_commands_of_a_cluster() -> None:
    """Every edge has one interface that sends it, and one shaper of its rate there."""
    rng = random.Random(3)
    for sizes, rates, leaf in (
        ("2x4", (200, 1000), "ns"),
        ("2x2x2", (1, 2, 3), "ns"),
        ("3x2", (7, 9), "lo"),
        ("2x2x3", ("2*5", "6*4", 9), "ns"),
    ):
        cluster = Cluster.of(sizes, rates, leaf)  # pyright: ignore
        assert len(set(cluster.meters())) == len(cluster.tree.edges)
        shaped: dict[tuple[str, str], float] = {}
        for tool, space, batch in cluster.commands():
            for line in batch.splitlines() if tool == "tc" else ():
                words = line.split()
                shaped[space, words[3]] = float(words[7].removesuffix("bit"))
                assert words[8:] == ["burst", "81920", "limit", "1048576"]
        for edge, meter in zip(cluster.tree.edges, cluster.meters(), strict=True):
            assert shaped[meter] == pytest.approx(edge.bandwidth * 8)
        a, b = rng.sample(range(cluster.ranks), 2)
        there, back = (np.array(cluster.tree.path(*p)) for p in ((a, b), (b, a)))
        assert len(there) == len(back) >= 1


@needs_lab
def test_ranks_listen_at_addresses_and_in_namespaces_of_their_own() -> None:
    def below(pid: int) -> list[int]:
        found = [int(p) for file in Path(f"/proc/{pid}/task").glob("*/children") for p in file.read_text().split()]
        return [pid, *(each for p in found for each in below(p))]

    with Lab(Cluster.of("2x1", FAST), most_late=LATE) as lab:
        assert lab._process is not None
        ports = {pid: set(listening(pid).values()) for pid in below(lab._process.pid)}
        ranks = [pid for pid, addresses in ports.items() if addresses]
        spaces = [os.readlink(f"/proc/{pid}/ns/net") for pid in ranks]
        assert sorted((ports[pid] for pid in ranks), key=min) == [{"0100000A"}, {"0200000A"}]  # 10.0.0.1 and 10.0.0.2
        assert len({*spaces, os.readlink("/proc/self/ns/net")}) == 3
