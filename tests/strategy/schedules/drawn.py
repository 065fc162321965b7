"""Random schedules that are right, and faults planted in them."""

from collections import defaultdict
from random import Random

from shardplan.strategy.schedules import Action, Schedule

FAULTS = (
    "missing", "doubled", "weights first", "wrong owner", "swapped sends", "swapped receives", "cyclic wait", "memory",
)  # fmt: skip


def drawn(random: Random, messages: bool, ranks: int | None = None) -> Schedule:
    """A schedule by chance: at each turn a rank does one thing that it can do, and a message is placed at both ends."""
    p, v, m = ranks or random.randint(1, 4), random.randint(1, 2), random.randint(1, 4)
    n = p * v
    homes = random.choice(([s % p for s in range(n)], [min(s % (2 * p), 2 * p - 1 - s % (2 * p)) for s in range(n)]))
    backward, rows = random.random() < 0.9, [[] for _ in range(p)]
    ready, left = [Action(0, "F", i) for i in range(m)], m * n * (2 if backward else 1)
    while left:
        a = ready.pop(random.randrange(len(ready)))
        rows[homes[a.stage]].append(a)
        left -= a.kind != "W"
        if a.kind == "I":
            ready.append(Action(a.stage, "W", a.microbatch))
        if a.kind == "W":
            continue
        to = a.stage + 1 if a.kind == "F" else a.stage - 1
        if a.kind == "F" and to == n:
            if backward:
                ready.append(Action(a.stage, random.choice("BI"), a.microbatch))
        elif to >= 0:
            kind = "F" if a.kind == "F" else random.choice("BI")
            ready.append(Action(to, kind, a.microbatch))
            if messages and homes[to] != homes[a.stage]:
                send = Action(a.stage, f"SEND_{'F' if kind == 'F' else 'B'}", a.microbatch)
                rows[homes[a.stage]].append(send)
                rows[homes[to]].append(send.matching)
    rows = [[*row, *(a for a in ready if homes[a.stage] == r)] for r, row in enumerate(rows)]
    if random.random() < 0.3 and not messages:
        for row in rows:
            row.insert(random.randint(0, len(row)), None)
    return Schedule(tuple(map(tuple, rows)), m)


def planted(random: Random, fault: str, found: Schedule) -> Schedule | None:
    """The schedule with a fault of that kind in it, where it can be; it need not be wrong then."""
    rows = [list(row) for row in found.ranks]
    places = [(r, i) for r, row in enumerate(rows) for i, a in enumerate(row) if a is not None]
    r, i = random.choice(places)
    if fault == "missing":
        del rows[r][i]
    elif fault == "doubled":
        rows[r].insert(random.randint(0, len(rows[r])), rows[r][i])
    elif fault == "wrong owner":
        other = random.randrange(len(rows))
        rows[other].insert(random.randint(0, len(rows[other])), rows[r].pop(i))
    elif fault == "weights first":
        halves = [(r, i) for r, i in places if rows[r][i].kind == "I"]
        if not halves:
            return None
        r, i = random.choice(halves)
        j = rows[r].index(Action(rows[r][i].stage, "W", rows[r][i].microbatch))
        rows[r][i], rows[r][j] = rows[r][j], rows[r][i]
    elif fault in ("swapped sends", "swapped receives"):
        ends = defaultdict(list)
        for r, i in places:
            if rows[r][i].kind[:4] == ("SEND" if fault.endswith("sends") else "RECV"):
                ends[r, found.owners[rows[r][i].peer]].append(i)
        pairs = [(key[0], *random.sample(found, 2)) for key, found in ends.items() if len(found) > 1]
        if not pairs:
            return None
        r, i, j = random.choice(pairs)
        rows[r][i], rows[r][j] = rows[r][j], rows[r][i]
    elif fault == "cyclic wait":
        row = random.choice(rows)
        if len(row) < 2:
            return None
        row.insert(random.randrange(len(row)), row.pop(random.randrange(len(row))))
    return Schedule(tuple(map(tuple, rows)), found.microbatches) if any(map(any, rows)) else None
