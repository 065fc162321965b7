"""Pipeline schedules as data.

Reading order:

- `action`     `Action`: one thing that a rank does for a stage, as text
- `schedule`   `Schedule`: a list of actions a rank, as text and as CSV of torch
- `simple`     GPipe and 1F1B
- `table`      the generators by name: `schedule`
"""

from shardplan.strategy.schedules.action import Action
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.table import GENERATORS, schedule

__all__ = ["GENERATORS", "Action", "Schedule", "schedule"]
