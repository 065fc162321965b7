"""`Action`: one thing that a rank does for a stage, in the notation of `torch.distributed.pipelining`.

`0F3` is the forward of stage 0 on microbatch 3. B is the whole backward, I and W its two halves: the gradients of the
stage's input, which the stage before waits for, and of its weights. `(0F3;1B1)OVERLAP_F_B` runs its parts together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from shardplan.errors import ScheduleError, excerpt

COMPUTE = ("F", "B", "I", "W")
SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")
MESSAGES = (*SENDS, *RECEIVES)
STATE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # of a stage, whatever the microbatch
OURS = ("OPT", "OFFLOAD", "RELOAD")  # what torch does not know: written to a file only on request
OVERLAP = "OVERLAP_F_B"
OF_A_MICROBATCH = (*COMPUTE, *SENDS, *RECEIVES, "OFFLOAD", "RELOAD")
KINDS = (*COMPUTE, *SENDS, *RECEIVES, *STATE, OVERLAP, *OURS)

# The longer names first: SEND_F is no F.
_ONE = re.compile(rf"(\d{{1,9}})({'|'.join(sorted(set(KINDS) - {OVERLAP}, key=len, reverse=True))})(\d{{0,9}})")


@dataclass(frozen=True, slots=True)
class Action:
    """`stage`, one of `KINDS`, and the `microbatch`, None where the kind has none; `parts` of an overlap (stage -1).

    >>> Action.parse("(0F3;1B1)OVERLAP_F_B").parts[1]
    Action.parse('1B1')
    """

    stage: int
    kind: str
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(f"a kind of action is {excerpt(self.kind)}; legal: {', '.join(KINDS)}")
        if self.kind == OVERLAP:
            if not self.parts or any(part.kind not in COMPUTE for part in self.parts):
                raise ScheduleError(f"{self} overlaps no computations; legal are parts of the kinds F, B, I and W")
        elif (self.microbatch is None) == (self.kind in OF_A_MICROBATCH):
            wanted = "a" if self.microbatch is None else "no"
            raise ScheduleError(f"{self} is malformed: {self.kind} has {wanted} microbatch")

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    def __repr__(self) -> str:
        return f"Action.parse({str(self)!r})"

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action that `text` says; raises `ScheduleError` where it says none."""
        return _parse(text)

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The parts of an overlap, or the action itself."""
        return self.parts or (self,)

    @property
    def is_pair(self) -> bool:
        """Whether it is a forward and a whole backward, run together."""
        return {part.kind for part in self.parts} == {"F", "B"}

    @property
    def peer(self) -> int:
        """The stage at the other end of a send or a receive, of a chain of stages."""
        return self.stage + (1 if self.kind in ("SEND_F", "RECV_B") else -1)

    @property
    def matching(self) -> Action:
        """The receive that meets a send, and the other way round."""
        verb, _, way = self.kind.partition("_")
        return Action(self.peer, f"{'RECV' if verb == 'SEND' else 'SEND'}_{way}", self.microbatch)


def value_pass(kind: str) -> str:
    """Return the pass whose values a computation takes and hands on: B for I, which does that part of a B."""
    return "B" if kind == "I" else kind


@lru_cache(maxsize=1 << 16)
def _parse(text: str) -> Action:
    bare = text.strip()
    if bare.startswith("(") and bare.endswith(f"){OVERLAP}"):
        inside = bare[1 : -len(OVERLAP) - 1]
        return Action(-1, OVERLAP, parts=tuple(_parse(part) for part in inside.split(";")))
    if found := _ONE.fullmatch(bare):
        stage, kind, microbatch = found.groups()
        return Action(int(stage), kind, int(microbatch) if microbatch else None)
    raise ScheduleError(
        f"{excerpt(text)} is no action; legal are a stage, a kind and a microbatch, as in 0F3 or 2SEND_B1"
    )
