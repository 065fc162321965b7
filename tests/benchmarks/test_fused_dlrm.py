"""The fused DLRM step: figures of its all-to-all, the replay beside the simulation, and what its assumptions say."""

from collections import defaultdict
from itertools import product
from typing import Any

import pytest
from benchmarks.fused_dlrm import SHAPE, Pair, assumptions, job_of, replayed, step, topology
from benchmarks.fused_dlrm import MeasuredCosts as Costs

import shardplan as sp
from shardplan.core.ops import AllToAll
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.hardware.prices.fused_kernels import KernelConstants, KernelRates
from shardplan.simulation.predict import predict

RATE = 25e9
SMALL = {"nodes": 8, "tables": 3, "dim": 8, "pooling": 4, "batch": 16, "mlp_layers": 7, "mlp_width": 12, "rows": 50}


def network(link: str, shape: tuple[int, ...]) -> sp.Topology:
    size = 1
    for n in shape:
        size *= n
    lines = ["version = 1", 'name = "t"', "[[levels]]", 'name = "node"', f"size = {size}", f'link = "{link}"']
    lines += [f"shape = {list(shape)}"] if link == "torus" else []
    return sp.Topology.parse("\n".join([*lines, 'bandwidth = "25 GB/s"', 'latency = "0 s"', 'source = "t"']) + "\n")


def exchanged(ranks: int, pair_bytes: int) -> Program:
    """Every rank sends every other one so many bytes."""
    mesh = sp.Mesh(x=ranks)
    kind = TensorType("f32", (ranks * pair_bytes // 4, ranks), (None, "x"), mesh)
    return Program({"a": kind}, [Step(AllToAll(1, 0, ("x",)), ("a",), ("b",))], ("b",))


@pytest.mark.parametrize(
    ("link", "shape", "times"),
    [("switch", (128,), 127), ("torus", (8, 16), 288), ("switch", (8,), 7), ("torus", (2, 4), 6),
     ("switch", (16,), 15), ("torus", (4, 4), 12), ("torus", (2, 8), 20)],
)  # fmt: skip
def test_the_closed_form_and_events_of_an_all_to_all(link: str, shape: tuple[int, ...], times: int) -> None:
    """In units of a pair's bytes over a link's bytes a second; ties of a torus go clockwise."""
    network_ = network(link, shape)
    program = exchanged(network_.size, 4096)
    for seconds in (predict(program, network_).seconds, sp.simulate(program, network_).seconds):
        assert seconds * RATE / 4096 == pytest.approx(times, rel=1e-9)


@pytest.mark.parametrize(("shape", "split", "clockwise"), [((8, 16), 256, 288), ((4, 4), 8, 12), ((2, 4), 4, 6)])
def test_ties_of_a_torus_decide(shape: tuple[int, int], split: float, clockwise: float) -> None:
    """The busiest link of dimension-ordered shortest ways: ties split both ways, or all one way."""
    for share, wanted in ((0.5, split), (1.0, clockwise)):
        load: dict[Any, float] = defaultdict(float)
        for at, to in product(product(*map(range, shape)), repeat=2):
            here = at
            for dim, size in enumerate(shape):
                ahead = (to[dim] - here[dim]) % size
                ways = [(1, ahead, share), (-1, ahead, 1 - share)] if 2 * ahead == size else []
                ways = ways or [(1, ahead, 1.0) if 2 * ahead < size else (-1, size - ahead, 1.0)]
                for sign, hops, part in ways:
                    for hop in range(hops):
                        load[(*here[:dim], (here[dim] + sign * hop) % size, *here[dim + 1 :], dim, sign)] += part
                here = (*here[:dim], to[dim], *here[dim + 1 :])
        assert max(load.values()) == wanted


def facts(**more: Any) -> dict[str, Any]:
    return {name: each["value"] for name, each in assumptions().items()} | SMALL | {"link": "torus"} | more


COSTS = Costs(
    KernelConstants("bags", KernelRates(reads=1e10)),
    KernelConstants("product", KernelRates(flops=1e11)),
    1e-6,
    ((1, 1.0), (8, 1.1), (64, 1.5)),
)


def test_the_replay_is_the_simulation_and_the_pair_is_found() -> None:
    given = facts()
    line = sp.simulate(job_of(*(given[name] for name in SHAPE)), topology(given, "1 TFLOP/s", "100 GB/s"))
    seconds, path = replayed(line, lambda op: op.cost.seconds)
    assert seconds == pytest.approx(line.seconds, rel=1e-12)
    assert sum(path.values()) == pytest.approx(seconds, rel=1e-12)
    pair = Pair(line)
    assert len(pair.bags) == len(pair.scatters) == 3
    assert len(pair.copies) == 1
    assert pair.moves and pair.back
    assert pair.nbytes == 8 * 16 * 4 * 1 * 4  # the batch of all nodes, tables and the dense vector, a column each


def test_a_step_says_what_it_replaced() -> None:
    found = step(facts(ids="gathered", gradients="after"), "accelerator", COSTS)
    line = sp.simulate(
        job_of(*(facts()[name] for name in SHAPE)),
        topology(facts(), facts()["accelerator_flops"], facts()["accelerator_memory"]),
    )
    assert found.unfused == pytest.approx(line.seconds, rel=1e-12)
    # Free ids and hidden gradients shorten a step, and more work of the pair lengthens it.
    shorter = step(facts(gradients="hidden"), "accelerator", COSTS)
    assert shorter.unfused < found.unfused
    assert step(facts(), "accelerator", COSTS, 100.0).unfused > step(facts(), "accelerator", COSTS).unfused


def test_every_assumption_has_a_tag_and_a_reason() -> None:
    for each in assumptions().values():
        assert each["tag"] in "EVRI"
        assert each["why"]
        assert each["value"] not in each.get("tries", ())
