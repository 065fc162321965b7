"""Text of a compiled module as a trace: what it moves, what it costs, how it is replayed, and what it is not.

`mlp_step.hlo` is a training step of two products that JAX 0.10.2 compiled for a mesh data=2 x tensor=4: weights in the
layouts (-, tensor) and (tensor, data), a batch cut over data. The groups of its four collectives are in all spellings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardplan as sp
from shardplan.errors import ParseError, ShardplanError, TopologyError
from shardplan.hardware.level import Level
from shardplan.interop.hlo_trace import HloSharding, HloTrace

TEXT = Path(__file__).parent / "hlo" / "mlp_step.hlo"
DATA = ((0, 4), (1, 5), (2, 6), (3, 7))
TENSOR = ((0, 1, 2, 3), (4, 5, 6, 7))
PAIR = sp.Topology.load("dgx-a100", nodes=1)


def trace() -> HloTrace:
    return sp.load(TEXT)


def test_what_a_step_moves() -> None:
    one = trace()
    assert (one.name, one.devices) == ("mlp_step", 8)
    assert [(c.kind, c.groups, c.operand_bytes) for c in one.collectives] == [
        ("all-gather", DATA, 8 * 16 * 4),
        ("all-reduce", TENSOR, 16 * 16 * 4),
        ("all-reduce", DATA, 16 * 16 * 4),
        ("all-reduce", DATA, 16 * 32 * 4),
    ]
    assert one.shardings == (
        HloSharding("param", "f32[16,16]{1,0}", "{devices=[4,2]<=[2,4]T(1,0)}"),
        HloSharding("param.1", "f32[8,32]{1,0}", "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"),
        HloSharding("param.2", "f32[32,16]{1,0}", "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"),
    )
    # Each of 8 receives the other half; of a sum over q twice (q - 1) / q of it.
    assert one.moved_bytes == 8 * 512 + 2 * 2 * 3 * 1024 + 4 * 2 * 1024 + 4 * 2 * 2048
    assert one.moved_bytes == sum(one.script.payload().values())
    lines = str(one).splitlines()
    assert lines[0] == "mlp_step: 4 collectives on 8 devices"
    assert lines[-1] == "  all-reduce of 2.05 kB over {0,4} {1,5} {2,6} {3,7}"


def test_its_time_is_that_of_its_collectives() -> None:
    one = trace()
    mesh = sp.Mesh(data=2, tensor=4)
    expected = list[float]()
    for text, op in (
        ("f32[16@data, 16]", "all_gather(%a; dim=0, axes=(data))"),
        ("f32[16, 16]{+tensor}", "all_reduce(%a; axes=(tensor))"),
        ("f32[16, 16]{+data}", "all_reduce(%a; axes=(data))"),
        ("f32[16, 32]{+data}", "all_reduce(%a; axes=(data))"),
    ):
        program = sp.Program.parse(f"program\n  mesh {mesh}\n  input %a: {text}\n  %b = {op}\n  output %b\n")
        expected.append(sp.simulate(program, PAIR).seconds)
    assert one.times(PAIR) == pytest.approx(expected)
    assert one.seconds(PAIR) == pytest.approx(sum(expected))


def test_a_placement_counts() -> None:
    levels = (Level("node", 2, "switch", 1e9, 1e-5), Level("gpu", 4, "switch", 1e11, 1e-6))
    topology = sp.Topology("", levels)
    found = {str(p): trace().seconds(p) for p in sp.placements(sp.Mesh(data=2, tensor=4), topology)}
    assert len({*found.values()}) > 1
    assert trace().seconds(topology) in found.values()


def test_it_is_replayed() -> None:
    one = trace()
    line = one.replayed(PAIR)
    assert line.devices == tuple(range(8))
    assert {i.kind for i in line.intervals} == {"all-gather", "all-reduce"}
    assert sum(i.received_bytes for i in line.intervals) == one.moved_bytes
    assert line.seconds > 0


@pytest.mark.parametrize("name", ["all_to_all", "permute", "mixed", "reduce_scatter", "uneven"])
def test_every_kind_has_a_time(name: str) -> None:
    one = HloTrace.parse((TEXT.parent / f"{name}.txt").read_text())
    assert one.devices == 8
    assert all(t > 0 for t in one.times(PAIR))


def test_it_is_no_program() -> None:
    one: Any = trace()
    with pytest.raises(ShardplanError, match=r"partition takes a Model and a Strategy, got <HloTrace mlp_step"):
        sp.partition(one, sp.Strategy(data=2))
    with pytest.raises(ShardplanError, match="a trace, no program"):
        sp.run(one, {})
    with pytest.raises(ShardplanError, match="a trace, no program"):
        sp.simulate(one, PAIR)
    with pytest.raises(ShardplanError, match=r"load: mlp_step.hlo is a trace, no model; legal is the path alone"):
        sp.load(TEXT, training=True)


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.hlo").write_text("no module")
    with pytest.raises(ParseError, match="not the text of an HLO module"):
        sp.load(tmp_path / "other.hlo")
    with pytest.raises(ParseError, match="cannot read the HLO text"):
        sp.load(tmp_path / "none.hlo")
    with pytest.raises(ParseError, match="2 replicas"):
        HloTrace.parse("HloModule a, replica_count=2\n")
    with pytest.raises(TopologyError, match="device 7 is not on the topology"):
        trace().seconds(sp.Topology.load("nominal", devices=4))
