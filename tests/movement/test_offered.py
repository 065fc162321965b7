"""Ops that offer themselves to the planner: taken where they are cheaper, never where they are dearer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings

import shardplan as sp
import strategies as some
from shardplan.core.layout import Layout
from shardplan.core.messages import lacking
from shardplan.core.ops import OPS, Op
from shardplan.core.ops.general import General
from shardplan.movement.redistribution.single import best_program, least_workspaces


@dataclass(frozen=True, slots=True)
class Jump(General):
    """Moves to any layout in one round, and counts the bytes that each device lacks `factor` times."""

    name: ClassVar[str] = "jump"
    factor: ClassVar[int] = 1
    layout: Layout

    def members(self, t: sp.TensorType) -> tuple[str, ...]:
        return t.mesh.axes

    def result(self, t: sp.TensorType) -> sp.TensorType:
        return t.with_layout(self.layout)

    def received_one(self, t: sp.TensorType, u: sp.TensorType) -> np.ndarray:
        return self.factor * lacking(t, u)

    def rounds(self, *operands: sp.TensorType) -> int:
        return 1

    @classmethod
    def moves(cls, source: sp.TensorType, destination: sp.TensorType) -> tuple[Op, ...]:
        plain = not (source.layout.partial or source.layout.root or destination.layout.partial)
        return (cls(destination.layout), cls(Layout(((),) * (source.ndim + 1)))) if plain else ()


@pytest.fixture
def offer() -> Iterator[None]:
    """The op in the table, and nothing remembered of plans with it or without it."""
    OPS["jump"] = Jump
    try:
        yield
    finally:
        del OPS["jump"]


def planned(source: sp.TensorType, destination: sp.TensorType) -> sp.Plan:
    best_program.cache_clear()
    least_workspaces.cache_clear()
    return sp.redistribute(source, destination)


def names(plan: sp.Plan) -> list[str]:
    return [step.op.name for step in plan.program.steps]


@pytest.mark.parametrize("ends", ["f32[64@(a,b)] to f32[64@(b,a)]", "f32[64@(a,b)]{+c} to f32[64@(b,a)]"])
def test_a_move_is_taken_where_it_is_cheaper(ends: str, offer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and behind a step that the search found."""
    mesh = sp.Mesh(a=3, b=2, c=4)
    source, destination = (sp.TensorType.parse(text, mesh) for text in ends.split(" to "))
    plan = planned(source, destination)
    assert names(plan)[-1] == "jump" and sp.Program.parse(str(plan.program)) == plan.program
    plan.certificate.check()
    for factor in (50, 1000):
        monkeypatch.setattr(Jump, "factor", factor)
        assert "jump" not in names(planned(source, destination))
    monkeypatch.setattr(Jump, "factor", 1)
    assert "jump" not in names(sp.redistribute(source, destination, portable=True))


@settings(max_examples=40, deadline=None)
@given(some.pairs(("even", "uneven", "partial"), most=12))
def test_an_offer_never_makes_a_plan_dearer(pair: tuple[sp.TensorType, sp.TensorType]) -> None:
    def charged(plan: sp.Plan) -> float:
        return best_program(*pair, None, None, False)[0].price if plan.program.steps else 0.0

    before = planned(*pair)
    price = charged(before)
    OPS["jump"] = Jump
    try:
        after = planned(*pair)
        assert charged(after) <= price * (1 + 1e-9)
        assert after.program == before.program or "jump" in names(after)
        after.certificate.check()
    finally:
        del OPS["jump"]
        best_program.cache_clear()
