"""A stop on devices that neither end of a move names: the line that says what it gains."""

import re

import pytest

import oracle
import shardplan as sp
from shardplan.movement.better_placement import GAIN

DGX = sp.Topology.load("dgx-h100", nodes=2)


def types(first: str, later: str, rows: int = 4096) -> tuple[sp.TensorType, sp.TensorType]:
    return (
        sp.TensorType.parse(f"bf16[{rows}@tp, 32768]", sp.Mesh.parse(first)),
        sp.TensorType.parse(f"bf16[{rows}@tp, 32768]", sp.Mesh.parse(later)),
    )


@pytest.mark.parametrize(
    ("first", "later", "idle"),
    [
        ("tp=8", "tp=4 devices=8:12", "devices 12 to 15"),
        ("tp=4 devices=[0,2,4,6]", "tp=8 devices=8:16", "devices 1, 3, 5, 7"),
        ("tp=2 devices=[5,1]", "tp=8 devices=8:16", "devices 0, 2, 3, 4, 6, 7"),
    ],
)
def test_the_line_says_what_two_plans_take(first: str, later: str, idle: str) -> None:
    s, t = types(first, later)
    plan = sp.redistribute(s, t, DGX)
    found = re.fullmatch(r"better     over the idle (.*) two plans would take .*: to `(.*)` on `(.*)`, and from there",
                         plan.better)  # fmt: skip
    assert found is not None and found[1] == idle
    assert str(plan).endswith(plan.better)
    stop = sp.TensorType.parse(found[2], sp.Mesh.parse(found[3]))
    ways = [sp.redistribute(s, stop, DGX), sp.redistribute(stop, t, DGX)]
    assert sum(way.seconds for way in ways) * GAIN <= plan.seconds
    for way, end in zip(ways, (stop, t), strict=True):
        way.certificate.check()
        small = sp.redistribute(*types_of(way, 64), DGX)
        assert oracle.unsound(small.program, small.program.output_types) is None and end.mesh == way.types[-1].mesh
    far = [way.certificate.level_bytes[0] for way in ways]
    assert sorted(far) == [0.0, plan.certificate.level_bytes[0]]


def types_of(plan: sp.Plan, rows: int) -> tuple[sp.TensorType, sp.TensorType]:
    """The ends of a plan with fewer elements."""
    ends = plan.certificate.sources[0], plan.certificate.destinations[0]
    return tuple(  # pyright: ignore[reportReturnType]
        sp.TensorType.parse(str(t).replace("4096", str(rows)).replace("32768", "4"), t.mesh) for t in ends
    )


def test_no_stop_where_none_is_idle_or_it_gains_nothing() -> None:
    silent = [
        (*types("tp=8", "tp=8 devices=8:16"), DGX),  # all are busy
        (*types("tp=8", "tp=4 devices=8:12"), None),  # without a topology
        (*types("tp=8", "tp=4 devices=8:12", 8), DGX),  # two plans start twice
        (*types("tp=4", "tp=2 devices=4:6"), DGX),  # in one node
        (*types("tp=8 devices=[0,1,2,3,4,5,6,15]", "tp=4 devices=8:12"), DGX),  # 15 holds a part of the source
    ]
    assert [sp.redistribute(*one).better for one in silent] == [""] * len(silent)
