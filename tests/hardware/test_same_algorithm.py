"""The algorithm that a price names and the one that a lowering names send the same bytes between the same devices."""

from collections import Counter

import numpy as np
import pytest

import shardplan as sp
from hardware.topologies import switches
from shardplan.core.ops import AllGather, AllReduce, Broadcast, Reduce, ReduceScatter
from shardplan.core.ops.collective import Collective
from shardplan.core.pattern import Groups
from shardplan.hardware import Fabric
from shardplan.hardware.prices.algorithms import ring, tree

CASES = [
    (AllGather(0, ("x",)), "f32[24@x, 5]", "ring", "ring"),
    (ReduceScatter(0, ("x",)), "f32[24, 5]{+x}", "ring", "ring"),
    (AllReduce(("x",)), "f32[24, 5]{+x}", "ring", "ring"),
    (AllReduce(("x",)), "f32[24, 5]{+x}", "tree", "tree"),
    (Reduce(("x",)), "f32[24, 5]{+x}", "ring", "chain"),
    (Reduce(("x",)), "f32[24, 5]{+x}", "tree", "tree"),
    (Broadcast(("x",)), "f32[24, 5]{root:x}", "ring", "chain"),
    (Broadcast(("x",)), "f32[24, 5]{root:x}", "tree", "tree"),
]


@pytest.mark.parametrize(("op", "text", "priced", "lowered"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_a_price_and_a_lowering_send_the_same(op: Collective, text: str, priced: str, lowered: str, size: int) -> None:
    t = sp.TensorType.parse(text, sp.Mesh(x=size))
    pattern = op.pattern(t)
    assert isinstance(pattern, Groups)
    flows: Counter[tuple[int, int]] = Counter()
    for one in {"ring": ring, "tree": tree}[priced](op.kind, pattern.members, pattern.nbytes, Fabric(switches(size))):
        for a, b, n in zip(one.flows.sender, one.flows.receiver, one.flows.nbytes, strict=True):
            flows[int(a), int(b)] += float(n)
    sent: Counter[tuple[int, int]] = Counter()
    lowering = op.lowering([t], np.arange(size), lowered)
    for one in lowering.rounds():
        for put in one.puts:
            for row in np.flatnonzero(put.source.elements()):
                sent[int(row), int(put.peer[row])] += int(put.source.elements()[row]) * t.itemsize
    assert sorted(sent) == sorted(flows)
    for pair, n in sent.items():
        assert n == pytest.approx(flows[pair]), (pair, flows[pair])
