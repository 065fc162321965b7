"""Pipeline schedules as data.

Reading order:

- `action`     `Action`: one thing that a rank does for a stage, as text
- `schedule`   `Schedule`: a list of actions a rank, as text and as CSV of torch
- `refusal`    `Refusal`: why a schedule is refused, and where
- `waits`      whether ranks wait for each other in a circle, also for messages
- `check`      all that a schedule must be before it is run
- `simple`     GPipe and 1F1B
- `table`      the generators by name: `schedule`
"""

from shardplan.strategy.schedules.action import Action
from shardplan.strategy.schedules.check import check, in_flight, refused
from shardplan.strategy.schedules.refusal import Refusal
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.table import GENERATORS, schedule

__all__ = ["GENERATORS", "Action", "Refusal", "Schedule", "check", "in_flight", "refused", "schedule"]
