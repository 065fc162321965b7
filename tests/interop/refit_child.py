"""A rank of a refit between Megatron's storage and vLLM's, on gloo; sides, store and what to do come as JSON."""

import json
import os
import re
import sys
import time
from collections import Counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed import TCPStore

import shardplan as sp
from execution.storages import Made
from execution.stores import Counting
from movement.weights_oracle import filled, logical
from shardplan.core.dtypes import numpy_dtype
from shardplan.execution.torch.dtypes import to_numpy, to_torch, torch_dtype
from shardplan.interop.torch.refit.handle import Refit
from shardplan.interop.torch.refit.meeting import RefitMeeting
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.weights import Weights

CONFIG = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 90, "torch_dtype": "float32",
}  # fmt: skip


def sides(colocated: bool, wide: str, narrow: str) -> tuple[Weights, Weights]:
    a = Weights.load("megatron-llama", CONFIG, tensor=2, divisible=4, dtype=wide)
    if narrow != wide:  # norms that are centred on zero
        a = Weights.parse(re.sub(r'(is = "norm\w* = e"\n)', r"\1plus = 1\n", str(a)))
        assert {f.entry.plus for f in a.families} == {0, 1}
    b = Weights.load("vllm-llama", CONFIG, tensor=2, devices=[0, 1] if colocated else [2, 3], dtype=narrow)
    return a, b


NODES = """name = "two nodes"
[[levels]]
name = "node"
size = 2
link = "switch"
bandwidth = "1 GB/s"
latency = "1 us"
[[levels]]
name = "gpu"
size = 2
link = "switch"
bandwidth = "10 GB/s"
latency = "1 us"
"""


def relaying(limit, wide: str, narrow: str):
    """Two servers of one node that are fed once between them."""
    a, _ = sides(False, wide, narrow)
    b = Weights.load("vllm-llama", CONFIG, tensor=1, replica=2, devices=[2, 3], dtype=narrow)
    plan = refit(a, b, sp.Topology.parse(NODES), limit, relay=True)
    assert plan.relays and sum(plan.received_bytes) * 2 == sum(refit(a, b).received_bytes)
    return plan


def tensors(named: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: to_torch(np.array(a)) for name, a in named.items()}


class Model:
    """The two sides' tensors of a rank, with values by seed."""

    def __init__(self, plan, rank: int):
        self.plan, self.rank = plan, rank
        self.on = rank in plan.source.devices, rank in plan.target.devices
        self.source = tensors(self.values(0)[rank]) if self.on[0] else None
        self.target = None
        if self.on[1]:
            self.target = {
                name: torch.full(shape, 7, dtype=torch_dtype(dtype))
                for name, shape, dtype in plan.target.parameters(rank)
            }

    def values(self, seed: int):
        found = filled(self.plan.source, logical(self.plan.source, seed))
        dtype = numpy_dtype(self.plan.source.dtype)
        return {rank: {name: a.astype(dtype) for name, a in named.items()} for rank, named in found.items()}

    def set(self, seed: int) -> None:
        for name, a in tensors(self.values(seed)[self.rank]).items() if self.source else ():
            self.source[name].copy_(a)

    def check(self, seed: int) -> None:
        self.check_is(self.values(seed))

    def check_is(self, values) -> None:
        """Compare the target with what the reference makes of the source's values."""
        if self.target is None:
            return
        want = self.plan.apply(values)[self.rank]
        padded = padding(self.plan, self.rank)
        for name, x in self.target.items():
            got = to_numpy(x)
            keep = ~padded[name]
            assert got[keep].tobytes() == want[name][keep].tobytes(), (self.rank, name)


def padding(plan, rank: int) -> dict[str, np.ndarray]:
    """Where no element arrives."""
    names = plan.target.parameters(rank)
    out = [np.ones(shape, bool).reshape(-1) for _, shape, _ in names]
    for found in (plan.regions(rank), plan.passed_on(rank)):
        mine = found.select_regions(found.target == rank)
        for k in range(len(mine)):
            at = mine.target_offset[k]
            for d in range(4):
                at = np.add.outer(at, np.arange(mine.sizes[k][d]) * mine.target_strides[k][d])
            out[mine.target_parameter[k]][np.asarray(at).reshape(-1)] = False
    return {n: o.reshape(s) for (n, s, _), o in zip(names, out, strict=True)}


def run_equal(rank: int, store: Any, colocated: bool, limit, wide: str, narrow: str, relay: bool = False) -> None:
    plan = relaying(limit, wide, narrow) if relay else refit(*sides(colocated, wide, narrow), memory_limit=limit)
    model = Model(plan, rank)
    both = (
        {"source": model.source, "target": model.target} if all(model.on) else {"model": model.source or model.target}
    )
    with Refit(plan, rank=rank, store=store, timeout=20, **both) as sync:
        assert sync.version is None
        assert limit is None or sync.staging_bytes <= limit, sync.staging_bytes
        for seed in range(3):
            model.set(seed)
            assert sync() == seed + 1
            model.check(seed)
        model.set(5)
        h = sync.start(version=7 if rank == 0 else None)
        assert h.wait() == 7 == sync.version == sync.serve()
        model.check(5)


def run_counted(rank: int, store: Any, relay: bool, changed: bool) -> None:
    import torch.distributed as dist

    from shardplan.execution.torch import group_state
    from shardplan.movement.weights import owners

    limit, kinds = 20_000, ("f32", "bf16")
    plan = relaying(limit, *kinds) if relay else refit(*sides(False, *kinds), memory_limit=limit)
    model = Model(plan, rank)
    made: Counter[str] = Counter()

    def counted(kind: str, call):
        def wrapped(*args, **kwargs):
            made[kind] += 1
            return call(*args, **kwargs)

        return wrapped

    with (
        patch.object(dist, "ProcessGroupGloo", counted("group", dist.ProcessGroupGloo)),
        patch.object(type(plan), "regions", counted("plan", type(plan).regions)),
        patch.object(RefitMeeting, "agree", counted("agreement", RefitMeeting.agree)),
        patch.object(owners, "move_of", counted("plan", owners.move_of)),
        patch.object(group_state, "GRACE", 60.0),
    ):
        sync = Refit(plan, model.source or model.target, rank=rank, store=store, timeout=20, changed_only=changed)
        assert made == {"group": 1, "plan": 1, "agreement": 1}, made
        model.set(1)
        sync()
        made.clear()
        state, meeting = sync._state, sync._meeting
        state.store, meeting.store = counting = Counting(state.store), Counting(meeting.store)
        state.__dict__["aside"] = counting[0]  # what is asked about slow waits, of which there are none here
        model.set(2)
        storages = Made()
        with storages:
            sync()
        assert not made, made
        assert not counting[0].calls and not counting[1].calls, counting
        assert storages.peak == 0, storages.peak
    model.check(2)
    sync.close()


def run_stale(rank: int, store: Any) -> None:
    a, b = sides(False, "f32", "f32")
    plan = refit(a, b, memory_limit=None if rank != 3 else 10_000)
    model = Model(plan, rank)
    try:
        Refit(plan, model.source or model.target, rank=rank, store=store, timeout=20)
    except sp.errors.LayoutError as error:
        print(error)


def run_joined(rank: int, store: Any) -> None:
    a, b = sides(False, "f32", "bf16")
    plan = refit(a, b)
    model = Model(plan, rank)
    side = "source" if rank < 2 else "target"
    sync = Refit.join(a if rank < 2 else b, model.source or model.target, side=side, rank=rank, store=store, timeout=20)
    assert sync.plan.hash == plan.hash
    model.set(3)
    sync()
    model.check(3)
    try:
        sync(version=10 + rank)
        raise AssertionError("ranks gave four versions")
    except sp.errors.LayoutError as error:
        assert str(error) == "a refit was given versions from 10 to 13; legal is one version on all ranks"
    assert sync.version is None
    part = Refit(
        refit(a, b, only="norm*"), model.source or model.target, rank=rank, store=store, timeout=20, name="part"
    )
    if model.target is not None:
        try:
            part()
            raise AssertionError("a part was refitted into torn weights")
        except sp.errors.BackendError as error:
            assert "the last refit failed: a refit was given versions" in str(error), error
    model.set(4)
    assert sync(version=20) == 20  # the ranks meet anew
    model.check(4)


def run_killed(rank: int, store: Any, victims: list[int]) -> None:
    """Call until one of these ranks is lost; then meet all again, started anew, and refit once more."""
    plan = refit(*sides(False, "f32", "bf16"), memory_limit=4000)
    model = Model(plan, rank)
    sync = Refit(plan, model.source or model.target, rank=rank, store=store, timeout=8)
    first = sync._meeting.number == 1
    print("ready", flush=True)
    while first:
        model.set((sync.version or 0) % 3)
        started = time.monotonic()
        try:
            sync()
        except sp.errors.ShardplanError as error:
            took, said = time.monotonic() - started, str(error)
            break
    if first:
        assert any(f"rank {v}" in said for v in victims), said
        assert took < 8 + 4, took
        assert sync.version is None
        if model.target is not None:
            try:
                sync.serve()
            except sp.errors.BackendError as refused:
                assert str(refused).startswith("these weights are not served: the last refit failed: "), refused
        print(f"failed {took:.3f} s: {said}", flush=True)
    model.set(4)
    version = sync()
    model.check(4)
    print("recovered", version, flush=True)


def run_late(rank: int, store: Any, victim: int, late: float, timeout: float) -> None:
    """One rank makes its handle later than the others: within the timeout all is as ever, beyond it is named."""
    plan = refit(*sides(False, "f32", "bf16"), memory_limit=4000)
    model = Model(plan, rank)
    if rank == victim:
        time.sleep(late)
    started = time.monotonic()
    try:
        sync = Refit(plan, model.source or model.target, rank=rank, store=store, timeout=timeout)
    except sp.errors.ShardplanError as error:
        print(f"failed {time.monotonic() - started:.3f} s: {error}", flush=True)
        return
    for seed in range(3):
        model.set(seed)
        sync()
        model.check(seed)
    print("recovered", sync.version, flush=True)


def run_engine(rank: int, store: str) -> None:
    from shardplan.interop.torch.refit.engine import TransferEngine, transfer_info

    a, b = sides(False, "f32", "bf16")
    plan = refit(a, b)
    model = Model(plan, rank)
    processed: list[object] = []
    engine = TransferEngine(model.source or model.target, rank, finish=processed.append if rank >= 2 else None)
    engine.init(json.loads(json.dumps(transfer_info(a, b, store, 20_000, 20.0))))
    model.set(1)
    assert engine.update_weights(version=3 if rank == 0 else None) == 3
    if rank >= 2:
        try:
            engine.serve()
        except sp.errors.BackendError as error:
            assert str(error).startswith("version 3 is not served: it is not finished"), error
        assert engine.finish() == engine.serve() == 3 and processed == [model.target]
    model.check(1)
    model.set(2)
    assert engine.update_weights(["*qkv_proj*", "embed"], version=4) == 4
    if model.target is not None:
        old, new = plan.apply(model.values(1))[rank], plan.apply(model.values(2))[rank]
        for name, x in model.target.items():
            want = (new if "qkv" in name or "embed" in name else old)[name]
            keep = ~padding(plan, rank)[name]
            assert to_numpy(x)[keep].tobytes() == want[keep].tobytes(), name
    engine.close()


if __name__ == "__main__":
    kind, arguments = sys.argv[1], json.loads(sys.argv[2])
    store = arguments.pop("store", None) or TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))  # the launcher's
    globals()[f"run_{kind}"](int(os.environ["RANK"]), store, **arguments)
