"""The pass on graphs of torch.fx: what is fused, what is not and why."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from tests.fused.graph_cases import BLIND, CASES, GraphCase, cut_sum, gathered, traced

from shardplan.errors import TopologyError
from shardplan.fused.deciding.graphs import GraphGroup, fuse_graph
from shardplan.fused.deciding.rows import REASONS
from shardplan.hardware.prices.fused import FusedConstants
from shardplan.hardware.prices.fused_kernels import KernelConstants, KernelRates

HERE = Path(__file__).parent
KERNELS = tuple(KernelConstants(kind, KernelRates(flops=1e9)) for kind in ("product", "vector", "bags"))
EAGER = FusedConstants("shm", 1e-6, 1e3, 1e2, 0.0, kernels=KERNELS, source="made up")
GROUPS = {"g": GraphGroup(2)}
OPERATORS = (
    "gemm_all_to_all",
    "gemv_all_reduce",
    "embedding_bag_all_to_all",
    "all_gather_gemm",
    "gemm_reduce_scatter",
)


def called(graph: object) -> list[str]:
    """The names of the operators of a graph."""
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CASES)
def test_graphs(name: str) -> None:
    one = CASES[name]
    graph = traced(one, "g")
    before = called(graph)
    found = fuse_graph(graph, EAGER, GROUPS)
    assert called(graph) == before
    (row,) = found.rows
    assert row.reason == one.reason, str(row)
    assert row.blocked == one.blocked, str(row)
    after = called(found.program)
    if one.reason == "fused":
        assert sum(f"shardplan.{row.op}.default" == target for target in after) == 1
        assert not any("_c10d_functional" in target for target in after)
        assert row.seconds[row.choice] == row.best_seconds
    else:
        assert after == before and row.text


def test_bags_that_are_brought_home_need_no_copy() -> None:
    after = called(fuse_graph(traced(CASES["bags home"], "g"), EAGER, GROUPS).program)
    assert not any("permute" in target or "clone" in target for target in after)


@pytest.mark.parametrize("name", BLIND)
def test_what_is_no_candidate(name: str) -> None:
    found = fuse_graph(traced(BLIND[name], "g"), EAGER, GROUPS)
    assert found.rows == () and "no candidates" in found.summary


def test_the_other_reasons() -> None:
    graph = traced(CASES["mm"], "g")
    given = {
        "unknown_group": (EAGER, {}),
        "no_peer_access": (EAGER, {"g": GraphGroup(2, peers=False)}),
        "memory": (EAGER, {"g": GraphGroup(2, room=100)}),
        "not_faster": (replace(EAGER, signal=1.0, bandwidth=1e12, copy_bandwidth=1e12), GROUPS),
    }
    for reason, (constants, groups) in given.items():
        (row,) = fuse_graph(graph, constants, groups).rows
        assert (row.reason, row.choice) == (reason, "unfused")
        assert bool(row.blocked) == (reason != "not_faster")
    assert {"taken", *given, *(one.reason for one in CASES.values())} == set(REASONS)


@pytest.mark.parametrize(("depth", "columns", "chosen"), [(30, 2, 0), (2, 30, 1)])
def test_of_two_pairs_with_one_product_that_which_saves_more_is_fused(depth: int, columns: int, chosen: int) -> None:
    given = [torch.ones(4, depth), torch.ones(depth, columns)]
    one = GraphCase(lambda a, b, g: cut_sum(gathered(a, g) @ b, g), lambda: given)
    found = fuse_graph(traced(one, "g"), EAGER, GROUPS)
    wanted: list[tuple[str, str]] = [("all_gather_gemm", "taken"), ("gemm_reduce_scatter", "taken")]
    wanted[chosen] = (wanted[chosen][0], "fused")
    assert [(row.op, row.reason) for row in found.rows] == wanted
    assert found.rows[1 - chosen].blocked == found.rows[chosen].place
    assert sum("_c10d_functional" in target for target in called(found.program)) == 2


def test_what_is_under_way_is_read_by_one_wait_alone() -> None:
    made = traced(CASES["mm"], "g")
    move = next(n for n in made.graph.nodes if "all_to_all" in str(n.target))
    with made.graph.inserting_after(move):
        other = made.graph.call_function(torch.ops.aten.relu.default, (move,))
        other.meta = dict(move.meta)
    (row,) = fuse_graph(made, EAGER, GROUPS).rows
    assert (row.reason, row.blocked, row.choice) == ("several_users", move.name, "unfused")
    assert row.text == "2 nodes read it; legal is one wait_tensor"


def test_constants_that_are_missing_are_said() -> None:
    graph = traced(CASES["mm"], "g")
    with pytest.raises(TopologyError, match="fuse_graph: calibration is None; legal are FusedConstants"):
        fuse_graph(graph, None, GROUPS)  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="fuse_graph: constants of shm without kernels product; legal are some"):
        fuse_graph(graph, replace(EAGER, kernels=()), GROUPS)


def test_fused_graphs_mean_the_same_on_processes() -> None:
    from execution.torch_launch import printed

    every = printed(2, HERE / "graph_child.py", seconds=120)
    fused = [name for name, one in CASES.items() if one.reason == "fused"]
    for wrong, ran, rows in every:
        assert wrong == []
        assert ran == dict.fromkeys([*fused, "compiled step"], 1)
        assert rows[0] == "fused"
