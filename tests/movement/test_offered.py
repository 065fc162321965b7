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
from shardplan.movement.redistribution.choice import Chosen
from shardplan.movement.redistribution.single_move import best_program


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

    def sent_one(self, t: sp.TensorType, u: sp.TensorType) -> np.ndarray:
        return self.received_one(t, u)

    def rounds(self, *operands: sp.TensorType) -> int:
        return 1

    @classmethod
    def moves(cls, source: sp.TensorType, destination: sp.TensorType) -> tuple[Op, ...]:
        plain = not (source.layout.partial or source.layout.root or destination.layout.partial)
        return (cls(destination.layout), cls(Layout(((),) * (source.ndim + 1)))) if plain else ()


@pytest.fixture
def offer() -> Iterator[None]:
    """The op in the table."""
    OPS["jump"] = Jump
    try:
        yield
    finally:
        del OPS["jump"]


def planned(source: sp.TensorType, destination: sp.TensorType, portable: bool = False) -> Chosen:
    """The best program, whatever was planned before with other ops in the table."""
    return best_program.__wrapped__(source, destination, None, None, portable)


def names(found: Chosen) -> list[str]:
    return [step.op.name for step in found.program.steps]


@pytest.mark.parametrize("ends", ["f32[64@(a,b)] to f32[64@(b,a)]", "f32[64@(a,b)]{+c} to f32[64@(b,a)]"])
def test_a_move_is_taken_where_it_is_cheaper(ends: str, offer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and behind a step that the search found."""
    mesh = sp.Mesh(a=3, b=2, c=4)
    source, destination = (sp.TensorType.parse(text, mesh) for text in ends.split(" to "))
    program = planned(source, destination).program
    assert program.steps[-1].op.name == "jump" and sp.Program.parse(str(program)) == program
    assert "jump" not in names(planned(source, sp.TensorType.parse("f32[64]", mesh), portable=True))
    monkeypatch.setattr(Jump, "factor", 50)
    assert "jump" not in names(planned(source, destination))


@settings(max_examples=25, deadline=None)
@given(some.pairs(("even", "uneven", "partial"), most=12))
def test_an_offer_never_makes_a_plan_dearer(pair: tuple[sp.TensorType, sp.TensorType]) -> None:
    before = planned(*pair)
    OPS["jump"] = Jump
    try:
        after = planned(*pair)
    finally:
        del OPS["jump"]
    assert after.price <= before.price * (1 + 1e-9)
    assert after.program == before.program or "jump" in names(after)
    assert after.program.output_types == before.program.output_types
