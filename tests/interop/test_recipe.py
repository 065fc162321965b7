"""What exports share: a move's reshape and transpose give every member the part that its type says."""

import numpy as np
import pytest

from interop.export_cases import cases, chain, place, random_case, topology
from shardplan.core.ops import AllGather, ReduceScatter
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.interop.exports.recipe import RecipeStep, recipe


def crossed() -> Program:
    """The first axis of the members cuts the second dim."""
    axes = ("data.node", "data.gpu")
    placement = place([[2, 4]], topology(node=2, gpu=4))
    return chain(placement, ["data"], (4, 2), 64, ReduceScatter((1, 0), axes), AllGather((1, 0), axes))


PROGRAMS = [crossed(), *(c.program for c in cases()), *(random_case(seed).program for seed in range(20))]


def tiles(move: RecipeStep, whole: TensorType, part: TensorType, group: tuple[int, ...]) -> list[np.ndarray]:
    """The numbers of the cells that each member of a group has, of those that all have together, by boxes alone."""
    place = {d: k for k, d in enumerate(whole.mesh.devices)}
    (origin,) = {tuple(whole.boxes()[place[d], :-1, 0].tolist()) for d in group}
    cells = np.arange(np.prod(whole.local_shape()[:-1])).reshape(whole.local_shape()[:-1])
    boxes = (part.boxes()[place[d], :-1] - np.array(origin)[:, None] for d in group)
    return [cells[tuple(slice(a, b) for a, b in box.tolist())].reshape(-1) for box in boxes]


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_members_have_the_parts_of_their_types(program: Program) -> None:
    r = recipe(program)
    for move in r.moves:
        if move.kind not in ("reduce_scatter", "all_gather"):
            continue
        (t,), (u,) = r.program.step_types(r.program.steps[move.step])
        whole, part = (t, u) if move.kind == "reduce_scatter" else (u, t)
        cells = np.arange(np.prod(whole.local_shape()[:-1]))
        apart = cells.reshape(move.split).transpose(move.turn).reshape(move.size, -1)
        for group in r.groups(move):
            assert np.array_equal(apart, tiles(move, whole, part, group)), (move.label, group)
        back = apart.reshape(move.members_first_shape).transpose(move.inverse_turn).reshape(-1)
        assert np.array_equal(back, cells)


def test_some_members_lie_across() -> None:
    """Else the law above would hold of any order: there are moves in which parts do not lie one after another."""
    moves = [m for program in PROGRAMS for m in recipe(program).moves if m.turn]
    assert sum(not m.straight for m in moves) > 10
