"""Stage-level events: schedules compiled to levels of actions, swept over many configurations at once.

Reading order:

- `stage_seconds`  `StageSeconds`: what chunks take, for n configurations
- `graph`          `ActionGraph`: actions as levels, and the recurrence over them
- `lists`          the graph of computations in order, whose messages hold nobody
- `placed`         the graph of a schedule whose sends and receives hold their ranks
- `periods`        what repeats in the lists of a named schedule
- `compiled`       `compiled`: a schedule made ready, once
- `sweeping`       `sweep`: when all is done; periods extrapolated where that is proved
"""

from shardplan.simulation.sweep.compiled import Compiled, compiled
from shardplan.simulation.sweep.stage_seconds import StageSeconds
from shardplan.simulation.sweep.sweeping import Swept, sweep

__all__ = ["StageSeconds", "Compiled", "compiled", "Swept", "sweep"]
