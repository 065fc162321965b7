"""What the seconds of a step go to: each cause is what a step loses without it, in turn, so that they add up.

Movements of layers go first, by the axes over which they are, then messages between stages, then what layers gather
and reduce of what is dealt out; what is left at work is compute, of which what is computed again is told apart.
Bubbles, and what comes once a step, are the closed form's own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.numbers import exchanges_tokens
from shardplan.simulation.closed.work import LocalMove

Floats = np.ndarray
TENSOR = frozenset(("tensor", "group", "expert_tensor", "expert_group"))
CONTEXT = frozenset(("context", "expert_context"))


def cause_of(move: LocalMove) -> str:
    """Return what the movement of a layer is for."""
    axes = {*move.axes}
    if exchanges_tokens(move):
        return "experts"
    return "tensor" if axes & TENSOR else "context" if axes & CONTEXT else "data"


def step_causes(form: ClosedForm, c: Configurations) -> Mapping[str, Floats]:
    """Return seconds of a step by what they go to, [n] each; they add up to the closed form's seconds.

    >>> from shardplan.hardware.topology import Topology
    >>> from shardplan.strategy.model import Model
    >>> from shardplan.strategy.strategy import Strategy
    >>> model = Model.load("gpt", layers=4, hidden=256, heads=4, seq=128, vocab=1000, precision="bf16")
    >>> form = ClosedForm(model, Topology.load("dgx-a100-80g", nodes=1))
    >>> c = Configurations.of([Strategy(data=4, tensor=2, global_batch=64)])
    >>> found = step_causes(form, c)
    >>> bool(found["tensor"][0] > 0), bool(abs(sum(found.values())[0] / form(c).seconds[0] - 1) < 1e-9)
    (True, True)
    """
    out, gone, found = form(c), set[str](), dict[str, Floats]()

    def keeps(but: frozenset[str]) -> Callable[[LocalMove], bool]:
        return lambda move: cause_of(move) not in but

    left = form.work_seconds(c, keeps(frozenset()))
    for name in ("tensor", "context", "experts", "data"):
        gone.add(name)
        now = form.work_seconds(c, keeps(frozenset(gone)))
        found[name], left = left - now, now
    every = keeps(frozenset(gone))
    for name, options in (("stage messages", {"waiting": False}), ("gathers", {"waiting": False, "bare": True})):
        now = form.work_seconds(c, every, **options)
        found[name], left = left - now, now
    once = form.work_seconds(c.without_recompute(), every, waiting=False, bare=True)
    return {
        "compute": once,
        "recompute": left - once,
        **found,
        "bubble": out.parts["bubble"],
        "once": out.parts["once"],
    }
