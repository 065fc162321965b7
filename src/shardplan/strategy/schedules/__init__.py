"""Pipeline schedules as data.

Reading order:

- `action`     `Action`: one thing that a rank does for a stage, as text
- `schedule`   `Schedule`: a list of actions a rank, as text and as CSV of torch
- `action_lists`  `ActionLists`: the lists as arrays, and what each action waits for
- `action_graph`  `ActionGraph`: actions as levels, and the recurrence over them
- `refusal`    `CounterExample`: why a schedule is refused, and where
- `replay`     `replay`: when each action runs; the two bubbles
- `waits`      whether ranks wait for each other in a circle, also for messages
- `check`      all that a schedule must be before it is run
- `simple`     GPipe, 1F1B, interleaved, breadth first, ZB-H1 and ZB-H2: forwards and backwards in turn
- `vshape`     ZB-V, V-Half, V-Min: the chain turns at the last rank
- `dualpipe`   DualPipe and DualPipeV: forwards overlapped with backwards
- `table`      the generators by name: `schedule`
- `shop`       `Shop`: stages on ranks with times and bounds of memory, for which an order is sought
- `shop_tree`  all orders of a shop that may be shortest
- `listing`    the list scheduler: `list_schedule`
- `exact`      the exact solver of small shops: `solve`
- `placing`    where sends and receives stand: `place_messages`
- `picture`    a schedule in time, as text and as SVG: `schedule_picture`, `svg`
"""

from shardplan.strategy.schedules.action import Action
from shardplan.strategy.schedules.check import broken_law, check, in_flight
from shardplan.strategy.schedules.exact import Solved, solve
from shardplan.strategy.schedules.listing import list_schedule
from shardplan.strategy.schedules.picture import schedule_picture, svg
from shardplan.strategy.schedules.placing import place_messages
from shardplan.strategy.schedules.refusal import CounterExample
from shardplan.strategy.schedules.replay import Replayed, Times, replay
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.shop import Shop
from shardplan.strategy.schedules.table import GENERATORS, schedule

__all__ = [
    "Action",
    "Schedule",
    "GENERATORS",
    "schedule",
    "CounterExample",
    "check",
    "in_flight",
    "broken_law",
    "Replayed",
    "Times",
    "replay",
    "Shop",
    "list_schedule",
    "Solved",
    "solve",
    "place_messages",
    "schedule_picture",
    "svg",
]
