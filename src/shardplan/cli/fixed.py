"""What `plan --fix` is given: fields of a strategy, and files: a schedule, or tables of layouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardplan.errors import ParseError, line

if TYPE_CHECKING:
    from shardplan.simulation.searching.own_plans import OwnParts
    from shardplan.strategy.partition.tables import Layouts

TABLES = ("serve", "stored", "held")


def read_fixed(text: str) -> OwnParts:
    """Return what is given: `tp=8 zero=1`, with `schedule=FILE.csv` and `layouts=FILE` among it, or one file alone.

    Raises `ParseError` and `ScheduleError` for a file that cannot be read, or says neither.
    """
    from shardplan.simulation.searching.own_plans import OwnParts, check_fixed
    from shardplan.strategy.schedules.schedule import Schedule
    from shardplan.strategy.strategy_text import strategy_fields

    words = text.replace(",", " ").split()
    if len(words) == 1 and "=" not in words[0] and Path(words[0]).is_file():
        words = [f"{'schedule' if words[0].endswith('.csv') else 'layouts'}={words[0]}"]
    files: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        name, _, value = word.partition("=")
        if name == "layouts" or (name == "schedule" and "." in value):
            if name in files:
                raise ParseError(f"--fix: {name} is said twice; legal is once")
            files[name] = value
        else:
            rest.append(word)
    schedule = Schedule.from_csv(files["schedule"]) if "schedule" in files else None
    layouts = _read_layouts(files["layouts"]) if "layouts" in files else None
    fields = strategy_fields(" ".join(rest))
    if schedule is not None and "schedule" in fields:
        raise ParseError("--fix: schedule is said twice; legal is once")
    called = " and ".join(f"{name} {line(value)}" for name, value in files.items())
    own = OwnParts(fields, schedule, layouts, called)
    check_fixed(own)
    return own


def _read_layouts(path: str) -> Layouts:
    from shardplan.core.decoding import read_text
    from shardplan.strategy.partition.tables import Layouts

    text = read_text(Path(path), legal="a file of the tables serve, stored and held, as str(Layouts) writes it")
    found = Layouts.parse(text)
    if not (found.serve or found.stored or found.held):
        raise ParseError(
            f"--fix: {line(path)} has no table; legal are {', '.join(TABLES)}, as str(Layouts) writes them"
        )
    return found
