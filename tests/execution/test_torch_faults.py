"""A rank that dies, stops, raises, comes late, never comes, or runs another program: a bounded wait, a clear error."""

import json
import re
from pathlib import Path

import pytest

from execution.torch_launch import Launch

pytest.importorskip("torch")
CHILD = Path(__file__).with_name("torch_fault_child.py")
RANKS, VICTIM = 4, 2


OTHERS = [k for k in range(RANKS) if k != VICTIM]


def launch(fault: str, timeout: float) -> tuple[dict[int, dict], list[int | None]]:
    """What four ranks saw of a fault, and their exit codes; a victim that does not end is not waited for."""
    job = Launch(RANKS, CHILD, fault, VICTIM, timeout)
    try:
        # only against a hang: starting takes as long as the machine is loaded
        job.wait(600, OTHERS if fault in ("stopped", "absent") else range(RANKS), together=False)
        told = [json.loads(line) for line in re.findall(r"^FAULT (.*)$", job.said(".out"), re.M)]
    finally:
        job.end()
    return {one["rank"]: one for one in told}, [rank.exitcode for rank in job.ranks]


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("killed", "BackendError", r"program \w{8}, step [12] \(.*\): lost rank 2 of \[0, 1, 2, 3\]: .*"),
        ("raising", "BackendError", r"program \w{8}, step [12] \(.*\): rank 2 failed: MemoryError: no room for the .*"),
        (
            "stopped",
            "TimedOut",
            r"program \w{8}, step 2 \(.*\): rank 2 of \[0, 1, 2, 3\] did not arrive within {timeout:g} s",
        ),
        (
            "absent",
            "TimedOut",
            r"program \w{8} did not start: rank 2 of \[0, 1, 2, 3\] did not arrive within {timeout:g} s",
        ),
    ],
)
def test_every_other_rank_says_who(fault: str, kind: str, text: str) -> None:
    seen, codes = launch(fault, 4.0)
    for rank in OTHERS:
        assert seen[rank]["kind"] == kind, seen
        assert re.fullmatch(text.replace("{timeout:g}", f"{seen[rank]['timeout']:g}"), seen[rank]["text"]), seen
        assert seen[rank]["seconds"] <= 2 * seen[rank]["timeout"]
        assert codes[rank] == 4
    assert codes[VICTIM] != 0


def test_another_program_is_an_error_on_every_rank() -> None:
    seen, codes = launch("other program", 4.0)
    assert codes == [4] * RANKS
    for rank in range(RANKS):
        assert seen[rank]["kind"] == "BackendError"
        assert seen[rank]["seconds"] <= 2 * seen[rank]["timeout"]
    for rank in OTHERS:
        assert re.fullmatch(
            r"the ranks \[0, 1, 2, 3\] do not run one program: rank \d runs program (\w{8}), rank 2 program "
            r"(?!\1)\w{8}; nothing was sent",
            seen[rank]["text"],
        )


@pytest.mark.parametrize("fault", ["late", "late start"])
def test_a_late_rank_is_waited_for(fault: str) -> None:
    seen, codes = launch(fault, 6.0)
    assert codes == [0] * RANKS
    # waits begin before the late rank sleeps half the timeout; with "late start" the clock of the others starts later
    assert max(told["seconds"] for told in seen.values()) >= (0 if fault == "late start" else 2.5)
