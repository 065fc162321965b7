"""An executor of schedules that knows nothing of the checker: it runs lists with values, and says how far it came.

Values are names of what they stand for. A rank that cannot go on, or finds that something is wrong, stands still at its
slot; the others go on as long as they can.
"""

from collections import Counter, defaultdict

from shardplan.strategy.schedules import Schedule


class Run:
    """`at`: the slot at which each rank stands at the end, the length of its list where it is done."""

    def __init__(self, found: Schedule, mode: str, bounds: tuple[int, ...] | None = None) -> None:
        self.rows = [list(row) for row in found.ranks]
        self.mode, self.bounds = mode, bounds
        self.at = [0] * len(self.rows)
        self.length = found.stages // found.copies
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for rank, row in enumerate(self.rows):
            for action in row:
                for a in (action.parts or (action,)) if action else ():
                    counts[a.stage][rank] += 1
        self.home = {s: min(c, key=lambda r: (-c[r], r)) for s, c in counts.items()}
        self.talks = any(a is not None and a.kind[:4] in ("SEND", "RECV") for row in self.rows for a in row)
        self.values: list[set[str]] = [set() for _ in self.rows]  # what each rank has
        self.ran: Counter[str] = Counter()
        self.broken: set[int] = set()
        self.queues: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)  # posted sends: slot, value
        self.asked: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)  # posted receives
        self.met: set[tuple[int, int]] = set()  # messages that are done, by place
        self.posted: set[tuple[int, int]] = set()
        while sum(self.advance(rank) for rank in range(len(self.rows))):
            pass
        backward = any(a.kind in "BIW" for row in self.rows for s in row if s for a in (s.parts or (s,)))
        self.fine = not self.broken and all(n == len(row) for n, row in zip(self.at, self.rows, strict=True))
        for m in range(found.microbatches):
            chains = [c for c in range(found.copies) if self.ran[f"{c * self.length}F{m}"]]
            self.fine &= len(chains) == 1
            for stage in range(self.length):
                for c in chains:
                    s = c * self.length + stage
                    self.fine &= self.ran[f"{s}F{m}"] == 1
                    self.fine &= not backward or (self.ran[f"{s}in{m}"], self.ran[f"{s}weights{m}"]) == (1, 1)
        self.fine &= all(not q for q in (*self.queues.values(), *self.asked.values()))

    def advance(self, rank: int) -> bool:
        """Do the slot of a rank if that can be done; a wrong one breaks the rank."""
        if rank in self.broken or self.at[rank] == len(self.rows[rank]):
            return False
        slot = self.at[rank]
        block = [slot]
        if self.mode == "batched":
            while self.is_message(rank, block[-1]) and self.is_message(rank, block[-1] + 1):
                block.append(block[-1] + 1)
        moved = False
        for i in block:
            if self.is_message(rank, i):
                moved |= self.post(rank, i)
        if rank in self.broken:
            return moved
        if self.is_message(rank, slot):
            if not all((rank, i) in self.met for i in block):
                return moved
        elif not self.compute(rank, slot):
            return False
        self.at[rank] = block[-1] + 1
        return True

    def stands(self, rank: int, slot: int) -> bool:
        """Whether a rank stands at a slot, or at messages that were posted together with it."""
        first = self.at[rank]
        side_by_side = all(self.is_message(rank, i) for i in range(first, slot + 1))
        return first == slot or (self.mode == "batched" and first < slot and side_by_side)

    def is_message(self, rank: int, slot: int) -> bool:
        row = self.rows[rank]
        return slot < len(row) and row[slot] is not None and row[slot].kind[:4] in ("SEND", "RECV")

    def post(self, rank: int, slot: int) -> bool:
        if (rank, slot) in self.posted:
            return False
        a = self.rows[rank][slot]
        forward = a.kind.endswith("F")
        if a.kind.startswith("SEND"):
            to = a.stage + (1 if forward else -1)
            value = f"{to}{'x' if forward else 'g'}{a.microbatch}"
            if value not in self.values[rank] or self.home.get(to, rank) == rank:
                self.broken.add(rank)
                return True
            self.values[rank].remove(value)
            pair = (rank, self.home[to])
            self.queues[pair].append((slot, value))
            if self.mode == "buffered":
                self.met.add((rank, slot))
        else:
            frm = a.stage - (1 if forward else -1)
            pair = (self.home.get(frm, rank), rank)
            self.asked[pair].append((slot, f"{a.stage}{'x' if forward else 'g'}{a.microbatch}"))
        self.posted.add((rank, slot))
        if self.queues[pair] and self.asked[pair]:
            (s, sent), (r, wanted) = self.queues[pair].pop(0), self.asked[pair].pop(0)
            if sent != wanted:
                self.broken |= set(pair)
            else:
                self.values[pair[1]].add(sent)
                self.met |= {(pair[0], s), (pair[1], r)}
        return True

    def compute(self, rank: int, slot: int) -> bool:
        whole = self.rows[rank][slot]
        for a in (whole.parts or (whole,)) if whole else ():
            if self.home[a.stage] != rank:
                self.broken.add(rank)
                return False
            if a.kind not in ("F", "B", "I", "W"):
                continue
            s, m, mine = a.stage, a.microbatch, self.values[rank]
            first, last = s % self.length == 0, (s + 1) % self.length == 0
            before, after = self.home.get(s - 1), self.home.get(s + 1)
            if a.kind == "F":
                needs = [] if first else [f"{s}x{m}"]
                wrong = self.ran[f"{s}F{m}"]
            elif a.kind == "W":
                needs, wrong = [], self.ran[f"{s}weights{m}"] or not self.ran[f"{s}in{m}"]
            else:
                needs = [] if last else [f"{s}g{m}"]
                wrong = self.ran[f"{s}in{m}"] or not self.ran[f"{s}F{m}"]
            missing = [n for n in needs if n not in mine]
            # A value of another rank's that no message brought will not come; else it may still be made.
            source = before if a.kind == "F" else after
            if wrong or (missing and self.talks and source != rank):
                self.broken.add(rank)
            if wrong or missing:
                return False
            if a.kind == "F":
                made = [] if last else [f"{s + 1}x{m}"]
                self.ran[f"{s}F{m}"] += 1
            elif a.kind == "W":
                made = []
            else:
                made = [] if first else [f"{s - 1}g{m}"]
                self.ran[f"{s}in{m}"] += 1
            if a.kind in "BW":
                self.ran[f"{s}weights{m}"] += 1
            mine.update(made)
            if not self.talks and made:
                to = after if a.kind == "F" else before
                if to is not None:
                    self.values[to].update(made)
            if self.bounds is not None:
                held = sum(
                    n - self.ran[f"{k.replace('F', 'weights')}"]
                    for k, n in self.ran.items()
                    if "F" in k and self.home[int(k.split("F")[0])] == rank
                )
                if held > self.bounds[rank]:
                    self.broken.add(rank)
                    return False
        return True
