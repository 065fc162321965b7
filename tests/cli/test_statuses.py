"""The exit statuses: every one in the table, the help and the page, and an object on stdout under `--json`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from shardplan.cli import plans as plan_commands
from shardplan.cli import run_command, searching, statuses
from shardplan.errors import TimedOut

ROOT = Path(__file__).parents[2]
MOVE = ("redistribute", "f32[8@x]", "f32[8]", "--mesh", "x=2")


def raising(error: BaseException) -> Callable[..., None]:
    """What stands for a function and raises."""

    def raised(*_: object, **__: object) -> None:
        raise error

    return raised


def requests(folder: Path) -> dict[int, tuple[str, ...]]:
    """A command for every status but those of signals."""
    assert run_command([*MOVE, "--out", str(folder / "plan.json")]) == 0
    return {
        0: MOVE,
        1: ("audit", "--mesh", "a=2,b=8", "--topology", "dgx-a100", "--nodes", "2", "--traffic", "a=1GB,b=1MB",
            "--fail-above", "1"),
        2: ("check", str(folder / "none.json")),
        3: (*MOVE, "--memory-limit", "1 B"),
        4: ("run", str(folder / "plan.json")),
    }  # fmt: skip


@pytest.mark.parametrize("status", [0, 1, 2, 3, 4, 130])
def test_every_status(
    status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(tmp_path)
    if status == 4:
        monkeypatch.setattr(
            "shardplan.execution.verify.run_index_data", raising(TimedOut("step 0: rank 1 did not arrive"))
        )
    if status == 130:
        monkeypatch.setattr(plan_commands, "read_types", raising(KeyboardInterrupt()))
    arguments = asked.get(status, MOVE)
    for more in ((), ("--json",)):
        capsys.readouterr()
        assert run_command([*arguments, *more]) == status
        out, err = capsys.readouterr()
        if more:
            said = json.loads(out)
            assert status < 2 or said["status"] == status
            assert status < 2 or f"shardplan: {said['message']}\n" == err
        else:
            assert status < 2 or (out == "" and len(err.splitlines()) == 1)


def test_a_reader_that_leaves_is_a_status_too() -> None:
    """`test_a_closed_pipe_is_quiet` produces it."""
    assert set(statuses.STATUSES) == {0, 1, 2, 3, 4, 130, 141}


def test_the_table_is_in_the_help_and_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert {int(status): meaning for status, meaning in rows} == statuses.STATUSES
    assert run_command([]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  +{status} +{re.escape(meaning)}$", shown, re.MULTILINE) for status, meaning in rows)


ERRORS: list[tuple[tuple[str, ...], str, int]] = [
    (("redistribute", "f32[8@y]", "f32[8]", "--mesh", "x=2"), "ParseError", 2),
    ((*MOVE, "--memory-limit", "1 B"), "Infeasible", 3),
    ((*MOVE, "--jsn"), "UsageError", 2),
    (("redistribute", "f32[8@x]"), "UsageError", 2),
    ((*MOVE, "--nodes", "many"), "UsageError", 2),
    (("frobnicate",), "UsageError", 2),
    (("lab", "frobnicate"), "UsageError", 2),
    ((), "UsageError", 2),
    (("validate", "none.jsonl"), "ParseError", 2),
]


@pytest.mark.parametrize(("arguments", "kind", "status"), ERRORS, ids=str)
def test_an_error_is_an_object(
    arguments: tuple[str, ...], kind: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a command line that no command understands."""
    assert run_command([*arguments, "--json"]) == status
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert (said["error"], said["status"]) == (kind, status) and err == f"shardplan: {said['message']}\n"
    assert kind != "Infeasible" or said["least_bytes"] == said["absolute_least_bytes"] == 48
    assert run_command([*arguments, "--", "--json"] if arguments else ["--jsn"]) == 2
    assert capsys.readouterr().out == ""


def test_memory_that_is_missing_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_commands, "read_types", raising(MemoryError()))
    assert run_command([*MOVE, "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {
        "error": "MemoryError",
        "message": "not enough memory for what was asked",
        "status": 3,
    }


@pytest.mark.parametrize(("strategy", "status"), [("tensor=8", 3), ("tensor=8 microbatch=1", 3), ("", 0)])
def test_fit_says_it_in_its_status(strategy: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    model = "gpt2-xl" if status == 0 else "llama3-70b"
    asked = ["plan", model, "--on", "dgx-a100-80g", "--nodes", "1", "--batch", "64"]
    asked += ["--fit", strategy or "data=8 microbatch=1"]
    assert run_command(asked) == status
    out, err = capsys.readouterr()
    assert out.startswith("does not fit: " if status else "fits: ") and err == ""
    assert run_command([*asked, "--json"]) == status
    assert json.loads(capsys.readouterr().out)["fits"] is (status == 0)


# Interrupts


def test_an_interrupt_while_the_commands_load_leaves_no_traceback() -> None:
    code = (
        "import runpy, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'shardplan.cli.plans': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "runpy.run_module('shardplan', run_name='__main__')\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


def test_workers_end_by_an_interrupt_without_a_word() -> None:
    with searching.worker_pool(1) as pool:
        assert pool is None
    waiting: list[Future[None]] = []
    with pytest.raises(KeyboardInterrupt), searching.worker_pool(2) as pool:
        assert pool is not None
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_DFL
        waiting += [pool.submit(time.sleep, 0.2) for _ in range(20)]
        raise KeyboardInterrupt
    assert any(one.cancelled() for one in waiting)
