"""The law of strategies on random small programs: a job computes what the program does, or is refused in a line."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from shardplan import LayoutError, Model, ScheduleError, Strategy, partition
from shardplan.strategy.options import check_options
from strategy.jobs import by_name, stepped
from strategy.small_models import Line, Recipe, recipes, strategies

SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 1.0}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "eps": 1e-2, "lr": 1e-1}
EXAMPLES = 40
REFUSED = 0.2  # the largest part of the examples that may be
LEAST = 1e-6  # gradients that are zero but for rounding are not compared with themselves


def inputs(found: Model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    out: dict[str, np.ndarray] = {}
    for name, t in found.program.inputs:
        if t.dtype == "i32":
            out[name] = rng.integers(0, 4, t.shape).astype(np.int32) if t.shape else np.zeros((), np.int32)
        elif name in found.replaced and name not in found.parameters:
            out[name] = np.zeros(t.shape)
        else:
            out[name] = rng.normal(0, 0.7, t.shape)
    return out


def differs(recipe: Recipe, said: dict[str, Any], optimizer: dict[str, Any]) -> list[str] | None:
    """What a job's step has otherwise than the program; None where it is refused."""
    strategy = Strategy(**said)
    whole = recipe.cook(strategy.sequences, **optimizer)
    given = inputs(whole)
    try:
        job = partition(recipe.cook(strategy.data * strategy.microbatch, **optimizer), strategy)
    except (LayoutError, ScheduleError) as error:
        assert "\n" not in str(error)
        return None
    want, got = by_name(whole.program, given), stepped(job, given)
    far: list[str] = []
    for name, new in {"loss": "loss", **whole.replaced}.items():
        apart = np.abs(got[name] - want[new]).max(initial=0) / max(LEAST, np.abs(want[new]).max(initial=0))
        far += [f"{name} by {apart:.1e}"] if not apart <= 1e-9 else []
    return far


def test_a_job_computes_what_the_program_does() -> None:
    counted: Counter[bool] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        recipe = data.draw(recipes())
        said, optimizer = data.draw(strategies(recipe)), data.draw(st.sampled_from((SGD, ADAMW)))
        try:
            check_options(recipe.cook(2, **optimizer), Strategy(**said))
        except LayoutError:  # of what does nothing there is another law
            reject()
        found = differs(recipe, said, optimizer)
        counted[found is None] += 1
        assert not found

    law()
    assert counted[True] <= REFUSED * counted.total()


SIZES = dict.fromkeys(("hidden", "ffn", "kv_heads", "ratio", "sequence", "wide", "head", "experts"), 4) | {"vocab": 5}
PROJECT, ALL = Line("project", 0, 0, 0), Line("all", 0, 0, 0)
FOUND: dict[str, tuple[Recipe, dict[str, Any]]] = {  # by the law, each of them wrong once
    "what a loop carries is read beside it": (Recipe(SIZES, (), (2,), (PROJECT,), (), ALL), {"pipeline": 2}),
    "what another stage made is read by the backward pass": (
        Recipe(SIZES, (), (2,), (PROJECT,), (Line("project", 2, 0, 0),), ALL),
        {"pipeline": 2},
    ),
    "a cotangent that a loop adds to goes on to the first stage": (
        Recipe(
            {"hidden": 2, "ffn": 5, "kv_heads": 1, "ratio": 2, "sequence": 6, "wide": 1, "head": 1, "experts": 4,
             "vocab": 4},
            (Line("spread", 4, 7, 6), Line("project", 5, 7, 1), Line("attend", 3, 0, 1), Line("mix", 6, 4, 2)),
            (4,),
            (Line("spread", 4, 7, 6), Line("project", 5, 7, 1), Line("attend", 3, 0, 1), Line("mix", 6, 4, 2)),
            (),
            Line("all", 7, 2, 0),
        ),
        {"pipeline": 2, "global_batch": 2, "schedule": "gpipe"},
    ),
    "a gradient goes through a loop that has no part in it": (
        Recipe(
            {"hidden": 2, "ffn": 6, "kv_heads": 6, "ratio": 6, "sequence": 4, "wide": 2, "head": 5, "experts": 4,
             "vocab": 7},
            (Line("both", 8, 6, 7), Line("project", 4, 9, 9), Line("both", 7, 4, 10), Line("look", 5, 0, 8)),
            (2,),
            (Line("both", 3, 9, 3), Line("turn", 10, 8, 8)),
            (),
            Line("all", 11, 4, 0),
        ),
        {"data": 4, "tensor": 2, "zero": 2, "microbatch": 2, "global_batch": 17},
    ),
    "what stands between two loops is made where the first one ends": (
        Recipe(SIZES, (), (1, 2), (PROJECT,), (Line("each", 0, 0, 0),), ALL),
        {"pipeline": 3},
    ),
    "a dim of size 1 is held": (
        Recipe(SIZES | {"ffn": 1}, (), (), (), (*(Line("project", 0, 1, 0),) * 2, Line("project", 0, 0, 1)), ALL),
        {"tensor": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_the_law_found(name: str) -> None:
    assert differs(*FOUND[name], SGD) == []
