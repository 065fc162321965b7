"""A rank that dies, stops, raises, comes late, never comes, or runs another program: a bounded wait, a clear error."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
CHILD = Path(__file__).with_name("torch_fault_child.py")
RANKS, VICTIM = 4, 2


def launch(fault: str, timeout: float) -> tuple[dict[int, dict], list[int | None], list[int]]:
    """Start four ranks by hand (torchrun would end the survivors); what they saw, their exit codes, their pids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(CHILD), fault, str(VICTIM), str(timeout)]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(k)}, stdout=subprocess.PIPE, text=True)
        for k in range(RANKS)
    ]
    seen: dict[int, dict] = {}
    deadline = time.monotonic() + 600  # only against a hang: starting takes as long as the machine is loaded
    try:
        for k, process in enumerate(ranks):
            if k == VICTIM and fault in ("stopped", "absent"):
                continue
            out, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            for line in re.findall(r"^FAULT (.*)$", out, re.M):
                told = json.loads(line)
                seen[told["rank"]] = told
    finally:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(10)
            if process.stdout:
                process.stdout.close()
    return seen, [p.returncode for p in ranks], [p.pid for p in ranks]


OTHERS = [k for k in range(RANKS) if k != VICTIM]


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
    seen, codes, _ = launch(fault, 4.0)
    for rank in OTHERS:
        assert seen[rank]["kind"] == kind, seen
        assert re.fullmatch(text.replace("{timeout:g}", f"{seen[rank]['timeout']:g}"), seen[rank]["text"]), seen
        assert seen[rank]["seconds"] <= 2 * seen[rank]["timeout"]
        assert codes[rank] == 4
    assert codes[VICTIM] != 0


def test_another_program_is_an_error_on_every_rank() -> None:
    seen, codes, _ = launch("other program", 4.0)
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
    seen, codes, _ = launch(fault, 6.0)
    assert codes == [0] * RANKS
    # waits begin before the late rank sleeps half the timeout; with "late start" the clock of the others starts later
    assert max(told["seconds"] for told in seen.values()) >= (0 if fault == "late start" else 2.5)
