"""`closed_step`: what a step takes, without its events: exact for equal chunks and free messages, else a lower bound.

A makespan never falls where an action takes longer. So that of equal chunks, each as short as the shortest, is a bound
of any, and where they are equal it is exact. `lower_bound` is another one, and so is the length of any way through the
actions. The largest of them is the closed form.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardplan.core import validation
from shardplan.simulation.sweep.bounds import BLOCK, bound_forms
from shardplan.simulation.sweep.compiled_schedule import CompiledSchedule, checked
from shardplan.simulation.sweep.critical_paths import critical_paths
from shardplan.simulation.sweep.equal_lines import equal_lines
from shardplan.simulation.sweep.stage_seconds import StageSeconds


def closed_step(compiled: CompiledSchedule, stages: StageSeconds, near: bool = True) -> np.ndarray:
    """Return seconds [n], never more than `sweep` says; the same for equal chunks whose messages take no time.

    `near` also takes the `critical_paths` of the schedule, which are looked for once, in some milliseconds: where
    chunks differ and messages take time it is then some tenths of a percent below events, otherwise some percent.
    Raises `ShardplanError` for another number of chunks, and where passes run `together`.

    Source: DESIGN, schedules as data (the table of bubbles).

    >>> from shardplan.simulation.sweep import compile_schedule
    >>> closed_step(compile_schedule("zb-h1", 4, 8), StageSeconds.equal(4, 1.0, 1.0, 1.0))
    array([27.])
    """
    checked("closed_step", compiled, stages)
    forms, lines, found = bound_forms(compiled), equal_lines(compiled), np.empty(len(stages))
    if validation.flag("near", near):
        forms = replace(forms, chains=np.concatenate([forms.chains, critical_paths(compiled)]))
    for low in range(0, len(stages), BLOCK):
        part = slice(low, low + BLOCK)
        table = stages.table(part)
        least = table[1 : 1 + 3 * compiled.chunks].reshape(3, compiled.chunks, -1).min(axis=1)
        found[part] = np.maximum(forms.of(table), (lines @ least).max(axis=0))
    return found + stages.before + stages.after
