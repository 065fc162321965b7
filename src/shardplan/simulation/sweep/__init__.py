"""Stage-level events: the graph of a schedule swept over many configurations at once.

What waits for what is said in `strategy.schedules.action_lists`.

Reading order:

- `stage_seconds`      `StageSeconds`: what chunks take, for n configurations
- `periods`            what repeats in the lists of a named schedule
- `compiled_schedule`  `compile_schedule`: a schedule made ready, once
- `sweeping`           `sweep`: when all is done; periods extrapolated where that is proved
- `bounds`             `lower_bound`: what no order of the same work is below
- `equal_lines`        the makespan of equal chunks as a maximum of lines
- `critical_paths`     some ways through the actions, as bounds
- `closed_step`        `closed_step`: exact for equal chunks, else a bound
- `lines`              `timeline_of`: one configuration as a `Timeline`, with memory
"""

from shardplan.simulation.sweep.bounds import lower_bound
from shardplan.simulation.sweep.closed_step import closed_step
from shardplan.simulation.sweep.compiled_schedule import CompiledSchedule, compile_schedule
from shardplan.simulation.sweep.lines import intervals_of, timeline_of
from shardplan.simulation.sweep.stage_seconds import StageSeconds
from shardplan.simulation.sweep.sweeping import Swept, sweep

__all__ = [
    "StageSeconds",
    "CompiledSchedule",
    "compile_schedule",
    "Swept",
    "sweep",
    "lower_bound",
    "closed_step",
    "intervals_of",
    "timeline_of",
]
