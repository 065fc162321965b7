"""Colour: on a terminal alone, by the two variables of the environment, and never in JSON; no word is changed by it."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest

from shardplan.cli.bar import (
    _RANKS,  # pyright: ignore[reportPrivateUsage]
    BOLD,
    CYAN,
    END,
    GREEN,
    RED,
    YELLOW,
    CommandStream,
    colour_line,
    wants_colour,
)

MOVE = ("redistribute", "f32[8@x]", "f32[8]", "--mesh", "x=2")
CODES = re.compile(r"\x1b\[[\d;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(*arguments: str, **environ: str) -> str:
    """What a command prints into a pipe, both streams."""
    known = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "shardplan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=known | environ, check=False, timeout=120)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environ", "on_terminal", "in_pipe"),
    [
        ({"TERM": "xterm"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_where_there_is_colour(environ: dict[str, str], on_terminal: bool, in_pipe: bool) -> None:
    assert (wants_colour(Terminal(), environ), wants_colour(io.StringIO(), environ)) == (on_terminal, in_pipe)


@pytest.mark.parametrize(
    ("line", "code", "part"),
    [
        ("shardplan: unknown axis 'x'", RED, "shardplan:"),
        ("shardplan: warning: slow", YELLOW, "shardplan: warning:"),
        ("does not fit: 716 GB", RED, "does not fit: 716 GB"),
        ("ok", GREEN, "ok"),
        ("bound by  compute 100 %", CYAN, "bound by"),
        ("Usage: shardplan", BOLD, "Usage:"),
    ],
)
def test_what_of_a_line_is_coloured(line: str, code: str, part: str) -> None:
    assert colour_line(line) == f"{code}{part}{END}{line.removeprefix(part)}"
    assert colour_line(f"  {line}") == f"  {line}"  # what goes on under another line


def test_lines_are_whole_however_they_are_written() -> None:
    stream = Terminal()
    begun = list[str]()
    coloured = CommandStream(stream, lambda: begun.append(stream.getvalue()), colour=True, answers=True)
    assert coloured.isatty()
    for part in ("4.01 times the best", "\n", "mem", "ory  1\n", "on  a\nok", " ok\n", "\x1b[2K bar", "\n"):
        coloured.write(part)
    wanted = f"{BOLD}4.01 times the best{END}\nmemory  1\n{CYAN}on{END}  a\n{GREEN}ok{END} ok\n\x1b[2K bar\n"
    assert stream.getvalue() == wanted and begun[0] == ""


def test_a_command_in_a_pipe_has_none_unless_asked_and_json_never() -> None:
    plain = printed(*MOVE)
    forced = printed(*MOVE, FORCE_COLOR="1")
    assert "\x1b" not in plain and f"{CYAN}memory{END}" in forced and CODES.sub("", forced) == plain
    assert "\x1b" not in printed(*MOVE, "--json", FORCE_COLOR="1")
    assert "\x1b" not in printed("redistribute", "f32[8@y]", "f32[8]", "--mesh", "x=2", "--json", FORCE_COLOR="1")


def on_terminal(*command: str, **environ: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    known = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", *_RANKS)} | {"TERM": "xterm"}
    process = subprocess.Popen([sys.executable, *command], stdout=theirs, stderr=theirs, env=known | environ)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 1 << 16):
            said += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(120) == 0
    return said.decode().replace("\r\n", "\n")


def test_a_command_on_a_terminal_has_it() -> None:
    text = on_terminal("-m", "shardplan", *MOVE)
    # A loaded machine takes its time, and then there is a line at work before the answer, too.
    answer = text[text.index(f"{BOLD}program") :]
    assert f"{CYAN}memory{END}" in answer and CODES.sub("", answer) == printed(*MOVE)


WORKS = """
import sys, time
from shardplan import cli
from shardplan.cli import bar
from shardplan.cli.bar import WaitingLine

bar.begin_waiting.__globals__["WaitingLine"] = lambda stream, what: WaitingLine(stream, what, 0.0)
def work(arguments):
    for _ in range(3000):  # the machine may be loaded; a line that never comes is missed below
        if all(line._bar is not None for line in bar._begun):
            break
        time.sleep(0.01)
    time.sleep(0.3)
    print("done with it")
    return 0
cli.run_command = work
sys.argv = ["shardplan", *sys.argv[1:]]
cli.main()
"""


def test_a_command_that_says_nothing_is_told_to_be_at_work() -> None:
    """The line with the time is there until the first word, and not where JSON goes into a pipe nor on other ranks."""
    text = on_terminal("-c", WORKS, "refit")
    assert "refit 0:00:00" in CODES.sub("", text) and text.rstrip().endswith(f"{BOLD}done with it{END}")
    assert text.rindex("refit") < text.index("done with it")
    other = on_terminal("-c", WORKS, "refit", RANK="1")
    assert other == f"{BOLD}done with it{END}\n"
    command = [sys.executable, "-c", WORKS, "refit"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("done with it\n", "")
