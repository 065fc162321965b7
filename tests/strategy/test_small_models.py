"""The law of strategies on random small programs: a job computes what the program does, or is refused in a line."""

from typing import Any

import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st

from shardplan import LayoutError, Model, ScheduleError, Strategy, partition
from strategy.jobs import by_name, stepped
from strategy.small_models import Recipe, recipes, strategies

OPTIMIZERS = ({"optimizer": "sgd", "lr": 1.0}, {"optimizer": "adamw", "eps": 1e-2, "lr": 1e-1})


def inputs(found: Model, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    for name, t in found.program.inputs:
        if t.dtype == "i32":
            out[name] = rng.integers(0, 4, t.shape).astype(np.int32) if t.shape else np.zeros((), np.int32)
        elif name in found.replaced and name not in found.parameters:
            out[name] = np.zeros(t.shape)
        else:
            out[name] = rng.normal(0, 0.7, t.shape)
    return out


def gap(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, relative to the largest element; gradients of zero but for rounding are zero."""
    return float(np.abs(got - want).max(initial=0) / max(1e-6, np.abs(want).max(initial=0)))


def differs(recipe: Recipe, said: dict[str, Any], optimizer: dict[str, Any]) -> list[str] | None:
    """What a job's step has otherwise than the program; None where it is refused."""
    strategy = Strategy(**said)
    whole = recipe.cook(strategy.sequences, **optimizer)
    given = inputs(whole)
    want = by_name(whole.program, given)
    try:
        job = partition(recipe.cook(strategy.data * strategy.microbatch, **optimizer), strategy)
    except (LayoutError, ScheduleError) as error:
        assert "\n" not in str(error)
        note(f"refused: {error}")
        return None
    got = stepped(job, given)
    pairs = {"loss": "loss", **whole.replaced}
    return [f"{n} by {e:.1e}" for n, o in pairs.items() if not (e := gap(got[n], want[o])) <= 1e-9]


@settings(max_examples=60)
@given(st.data())
def test_a_job_computes_what_the_program_does(data: st.DataObject) -> None:
    recipe = data.draw(recipes())
    said = data.draw(strategies(recipe))
    optimizer = data.draw(st.sampled_from(OPTIMIZERS))
    assert not differs(recipe, said, optimizer)
