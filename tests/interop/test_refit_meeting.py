"""Who serves a meeting and who is let in: two sides in any order, on one host and on two, while strangers come."""

import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardplan as sp
from execution.lab_here import needs_lab
from interop.refit_child import CONFIG, Model
from interop.test_refit import free_store
from rank_threads import in_threads
from shardplan.execution.lab.needs import namespace_command
from shardplan.fused.heap.handshake import Listener, connect
from shardplan.interop.torch.refit.handle import Refit
from shardplan.interop.torch.refit.meeting import RefitMeeting, close_store, store_of, unlike_error
from shardplan.interop.torch.refit.server import SIZE, TICK, MeetingServer
from shardplan.interop.torch.refit.store import MeetingStore
from shardplan.movement.weights.weights import Weights
from strangers import KINDS, come, listening

LOOPBACK = "0100007F"
HOST = "127.0.0.1"
TRAINER = Weights.load("megatron-llama", CONFIG, divisible=4, dtype="f32")
SERVER = Weights.load("vllm-llama", CONFIG, devices=[1], dtype="bf16")
PLAN = sp.refit(TRAINER, SERVER)


def port_of(store: str) -> int:
    return int(store.rpartition(":")[2])


def until(what: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


class Joined(threading.Thread):
    """A rank that joins, refits as often as it is told, and ends."""

    def __init__(self, rank: int, store: str, calls: int = 2):
        super().__init__(daemon=True)
        self.rank, self.store, self.calls, self.error = rank, store, calls, ""
        self.model, self.go, self.done = Model(PLAN, rank), threading.Semaphore(0), 0
        self.start()

    def run(self) -> None:
        side = ("source", "target")[self.rank]
        try:
            model: Any = self.model.source or self.model.target
            with Refit.join(
                (TRAINER, SERVER)[self.rank], model, side=side, rank=self.rank, store=self.store, timeout=20
            ) as sync:
                self.sync = sync  # kept, so that what is left is what `close` leaves
                self.done += 1
                for seed in range(1, self.calls + 1):
                    self.go.acquire()
                    self.model.set(seed)
                    sync()
                    self.model.check(seed)
                    self.done += 1
        except BaseException as error:
            self.error = repr(error)


def finished(ranks: list[Joined], before: set[int]) -> None:
    for rank in ranks:
        for _ in range(rank.calls):
            rank.go.release()
    for rank in ranks:
        rank.join(60)
    assert [(rank.error, rank.done) for rank in ranks] == [("", rank.calls + 1) for rank in ranks]
    until(lambda: set(listening()) <= before)


@pytest.mark.parametrize("secret", ["", "a:b@c@"])
@pytest.mark.parametrize("first", [0, 1])
def test_sides_of_one_host_join_in_any_order_and_leave_nothing(first: int, secret: str) -> None:
    before, store = set(listening()), free_store(secret)
    ranks = [Joined(first, store)]
    until(lambda: port_of(store) in listening())
    ranks.append(Joined(1 - first, store))
    until(lambda: all(rank.done for rank in ranks))
    assert {address for port, address in listening().items() if port not in before} == {LOOPBACK}
    finished(ranks, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refit_goes_on_while_strangers_come(kind: str) -> None:
    before, store = set(listening()), free_store("key@")
    with ExitStack() as stack:

        def strangers() -> None:
            for port in set(listening()) - before:
                for link in come(kind, HOST, port):
                    stack.callback(link.close)

        ranks = [Joined(0, store)]
        until(lambda: port_of(store) in listening())
        strangers()  # before the peer
        ranks.append(Joined(1, store))
        until(lambda: all(rank.done == 1 for rank in ranks))
        strangers()  # at the group's connections, too
        for rank in ranks:
            rank.go.release()
        until(lambda: all(rank.done == 2 for rank in ranks))
        strangers()
        for rank in ranks:
            rank.calls = 2
        finished(ranks, before)


def test_who_has_another_secret_is_told_so_and_no_secret_is_shown() -> None:
    store = free_store("right@")
    served = store_of(store, [0], 0, 5)
    try:
        for secret in ("", "wrong@"):
            text = f"tcp://{secret}{HOST}:{port_of(store)}"
            with pytest.raises(sp.BackendError) as error:
                store_of(text, [0, 1], 1, 5)
            said = text.replace("wrong", "...")
            assert str(error.value) == (f"store = {said!r}, rank 1: {HOST}:{port_of(store)} does not share this secret")
        with pytest.raises(RuntimeError):  # torch's own client is a stranger as any other
            dist.TCPStore(HOST, port_of(store), timeout=timedelta(seconds=1)).set("a", "b")
        served.set("a", "c")
        assert served.get("a") == b"c"
    finally:
        close_store(served)
    until(lambda: port_of(store) not in listening())


def test_an_address_of_another_host_is_never_served_here() -> None:
    before = listening()
    text = "tcp://192.0.2.7:29512"  # of documentation: nobody's
    with pytest.raises(sp.BackendError, match=r"'tcp://192\.0\.2\.7:29512', rank 0: nobody served it within 0\.3 s: "):
        store_of(text, [0, 1], 0, 0.3)
    assert listening() == before


def test_a_port_where_nothing_is_said_is_said() -> None:
    with socket.create_server((HOST, 0)) as server:
        where = f"{HOST}:{server.getsockname()[1]}"
        with pytest.raises(sp.BackendError) as error:
            store_of(f"tcp://{where}", [0], 0, 0.3)
        assert str(error.value) == (
            f"store = 'tcp://{where}', rank 0: nobody served it within 0.3 s: {where} takes connections, and says "
            "nothing"
        )


def test_a_port_that_something_else_has_is_said() -> None:
    with socket.create_server((HOST, 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"SSH-2.0-a\r\n" * 9), daemon=True).start()
        where = f"{HOST}:{server.getsockname()[1]}"
        with pytest.raises(sp.BackendError) as error:
            store_of(f"tcp://{where}", [0], 0, 5)
        assert str(error.value) == f"store = 'tcp://{where}', rank 0: {where} answers, and is not shardplan"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("tcp://127.0.0.1:70000", "tcp://127.0.0.1:70000"),
        ("tcp://s3cret@127.0.0.1", "tcp://...@127.0.0.1"),
        ("tcp://:29500", "tcp://:29500"),
        ("udp://127.0.0.1:29500", "udp://127.0.0.1:29500"),
        (29500, "29500"),
    ],
)
def test_texts_that_name_no_store(text: Any, said: str) -> None:
    with pytest.raises(sp.ParseError) as error:
        store_of(text, [0], 0, 1)
    shown = said if isinstance(text, int) else repr(said)
    assert str(error.value) == (
        f"store = {shown}; legal is tcp://HOST:PORT, tcp://SECRET@HOST:PORT, file:///PATH, or a store of "
        "torch.distributed"
    )


def test_of_as_many_on_both_sides_those_with_the_lowest_rank_are_right() -> None:
    limits = {1: "2", 2: "2", 0: "1", 3: "1"}
    assert str(unlike_error({rank: {"limit": limit} for rank, limit in limits.items()}, "refit")) == (
        "refit: ranks [1, 2] of 4 ranks came with another plan: its limit is 2, on rank 0 it is 1; legal is one plan "
        "on all ranks, and nothing was sent"
    )


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_who_has_come_less_often_catches_up(first: int, differs: bool) -> None:
    store, told = dist.HashStore(), ["", ""]
    meetings = [RefitMeeting(store, (0, 1), rank, "refit", 20.0) for rank in (0, 1)]
    meetings[1].number = 3

    def come(rank: int) -> None:
        try:
            meetings[rank].agree({"limit": str(rank * differs)}, "it")
        except sp.LayoutError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    threads[first].start()
    until(lambda: store.check([f"shardplan/refit/refit/words/{first}"]))
    threads[1 - first].start()
    for thread in threads:
        thread.join(30)
    assert [meeting.number for meeting in meetings] == [4, 4]
    error = (
        "it: rank 1 of 2 ranks came with another plan: its limit is 1, on rank 0 it is 0; legal is one plan on all "
        "ranks, and nothing was sent"
    )
    assert told == ([error, error] if differs else ["", ""])


def test_who_has_given_up_is_waited_for() -> None:
    store = dist.HashStore()
    for rank in (1, 0, 1):
        text = f"^refit did not start: rank {1 - rank} of 2 ranks did not arrive within 0.01 s$"
        with pytest.raises(sp.TimedOut, match=text):
            RefitMeeting(store, (0, 1), rank, "refit", 0.01).agree({}, "it")


def test_many_that_may_serve_have_one_server() -> None:
    store = free_store()
    found = [*in_threads(range(8), lambda rank: store_of(store, [rank], rank, 20)).values()]
    assert sum(each._leave is not None for each in found) == 1
    assert sorted(each.add("count", 1) for each in found) == list(range(1, 9))
    for each in found:
        close_store(each)
    until(lambda: port_of(store) not in listening())


def test_a_server_stays_for_those_that_are_connected_and_another_may_follow_it() -> None:
    store = free_store()
    first, second = (store_of(store, [rank], rank, 5) for rank in range(2))
    first.set("a", "1")
    close_store(first)
    time.sleep(3 * TICK)
    assert second.get("a") == b"1" and port_of(store) in listening()
    with pytest.raises(dist.DistNetworkError, match="is gone"):
        first.get("a")
    close_store(second)
    until(lambda: port_of(store) not in listening())
    third = store_of(store, [2], 2, 5)
    assert not third.check(["a"])
    del first, third  # one that nobody keeps has left
    until(lambda: port_of(store) not in listening())


def test_a_refit_that_fails_leaves_nothing() -> None:
    before, store = set(listening()), free_store()
    model: Any = Model(PLAN, 0)
    with pytest.raises(sp.TimedOut, match="refit: the target's side did not arrive within"):
        Refit.join(TRAINER, model.source, side="source", rank=0, store=store, timeout=0.3)
    with pytest.raises(sp.TimedOut, match="rank 1 of 2 ranks did not arrive within"):
        Refit(PLAN, model.source, rank=0, store=store, timeout=0.3)
    until(lambda: set(listening()) <= before)


def test_a_meeting_is_a_store_as_that_of_torch_is() -> None:
    mine = store_of(free_store("key@"), [0], 0, 0.2)
    other: Any = dist.TCPStore(HOST, 0, is_master=True, timeout=timedelta(seconds=0.2), wait_for_workers=False)
    raw = dist.PrefixStore("raw", mine), dist.PrefixStore("raw", other)
    random_ = random.Random(5)
    keys, values = ["a", "b", "c"], ["", "x", "y" * 3000, "7"]

    def tried(store: Any, name: str, *arguments: Any) -> Any:
        try:
            return getattr(store, name)(*arguments)
        except dist.DistStoreError:
            return "timed out"

    counts: dict[str, int] = {}
    for _ in range(400):
        key = random_.choice(keys)
        name, *arguments = random_.choice(
            [
                ("set", key, random_.choice(values)),
                ("get", key),
                ("add", f"n{key}", random_.randint(-3, 3)),
                ("get", f"n{key}"),
                ("check", random_.sample(keys, 2)),
                ("compare_set", key, random_.choice(values), random_.choice(values)),
                ("delete_key", key),
                ("wait", random_.sample(keys, 2), timedelta(seconds=0.01)),
            ]
        )
        if name == "get" and random_.random() < 0.8 and not raw[1].check([arguments[0]]):
            continue  # most would wait for good
        got, want = (tried(store, name, *arguments) for store in raw)
        assert got == want, (name, arguments)
        counts[str(want == "timed out")] = counts.get(str(want == "timed out"), 0) + 1
    assert min(counts.values()) > 20, counts
    copy = raw[0].clone()
    copy.set("z", "1")
    assert raw[0].get("z") == b"1"
    close_store(mine)
    with pytest.raises(dist.DistNetworkError):
        copy.get("z")


def test_a_wait_ends_when_the_last_key_comes() -> None:
    store = free_store()
    first, second = (store_of(store, [rank], rank, 20) for rank in range(2))
    heard: list[float] = []
    thread = threading.Thread(target=lambda: (second.wait(["a", "b"]), heard.append(first.add("n", 0))))
    thread.start()
    first.set("b", "")
    time.sleep(0.05)
    assert not heard
    first.add("n", 4)
    first.compare_set("a", "", "x")
    thread.join(20)
    assert heard == [4]
    close_store(second)
    close_store(first)


def test_a_wait_for_what_is_there_ends_at_once() -> None:
    store = store_of(free_store(), [0], 0, 1.0)
    for key in ("a", "b"):
        store.set(key, key)
    store.wait(["a", "b"])
    store.wait(["b"])
    close_store(store)


@pytest.mark.parametrize(
    "raw",
    [b"\xff\xff\xff\xff", SIZE.pack(3) + b"abc", SIZE.pack(5) + b"\x92\xa3foo", SIZE.pack(6) + b"\x92\xa3foo\x90"],
)
def test_nonsense_from_one_that_was_let_in_ends_its_connection_alone(raw: bytes) -> None:
    listener = Listener(HOST, 0, b"key")
    server = MeetingServer(listener)
    store = MeetingStore(HOST, listener.port, b"key", 5, 5)
    store.set("a", "1")
    with connect(HOST, listener.port, b"key") as link:
        link.sendall(raw)
        link.shutdown(1)
        link.settimeout(20)
        with suppress(ConnectionError):
            assert link.recv(1) == b""
    assert store.get("a") == b"1"
    server.leave()
    close_store(store)
    until(lambda: listener.port not in listening())


@needs_lab
def test_sides_of_two_hosts_join_in_any_order() -> None:
    child = Path(__file__).with_name("refit_hosts_child.py")
    root = child.parents[2]
    done = subprocess.run(
        [*namespace_command(), sys.executable, str(child)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root,
        env={
            "PYTHONPATH": f"{root / 'src'}:{root}:{root / 'tests'}",
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    both = json.loads(done.stdout.splitlines()[-1])
    assert len(both) == 2
    for here, there in both:
        # 10.0.0.1 and 10.0.0.2: the meeting, and gloo's own connections; no stray server.
        assert ["0100000A", 29517] in here["during"] and {address for address, _ in here["during"]} == {"0100000A"}
        assert there["during"] and {address for address, _ in there["during"]} == {"0200000A"}
        assert all(port != 29517 for _, port in there["during"])
        assert here["after"] == there["after"] == []


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        ({"drop": ["qn", "kn"]}, "rope_theta is 10000 at the source and 500 at the target"),
        ({"differ": "rope_theta"}, r"stores what .* does not take: qn \("),
        ({"differ": "rope_theta", "drop": "qn"}, r"does not take: kn \("),
        ({"drop": ["qn", "kn"], "differ": ["rope_theta"]}, None),
    ],
)
def test_sides_that_join_may_leave_out_and_differ_in_what_both_say(allowed: Any, message: str | None) -> None:
    config = CONFIG | {"head_dim": 8, "rope_theta": 10000}
    trainer = Weights.load("hf-qwen3", config, dtype="f32")
    server = Weights.load("vllm-llama", config | {"rope_theta": 500}, devices=[1], dtype="f32")
    store, said, models = free_store(), ["", ""], [tensors_of(w, rank) for rank, w in enumerate((trainer, server))]

    def work(rank: int) -> None:
        side: Any = {"side": ("source", "target")[rank], "rank": rank, "store": store, "timeout": 20}
        try:
            with Refit.join((trainer, server)[rank], models[rank], **side, **allowed) as sync:
                sync()
                assert sync.plan.dropped == ("qn", "kn")
        except Exception as error:
            said[rank] = str(error)

    in_threads(range(2), work)
    if message is not None:
        assert all(re.search(message, text) and "\n" not in text for text in said), said
        return
    assert said == ["", ""]
    plan = sp.refit(trainer, server, **allowed)
    wanted = plan.apply({0: {name: x.numpy() for name, x in models[0].items()}})[1]
    assert [name for name, x in wanted.items() if not np.array_equal(models[1][name].numpy(), x)] == []


def tensors_of(weights: Weights, rank: int) -> dict[str, torch.Tensor]:
    """Tensors by name: random ones on rank 0, and zeros, which padding stays, on others."""
    torch.manual_seed(0)
    return {name: torch.randn(shape) * (rank == 0) for name, shape, _ in weights.parameters(rank)}
