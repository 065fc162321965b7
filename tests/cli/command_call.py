"""A command given in this process: its status, what it printed, and what it said of mistakes."""

import pytest

from shardplan.cli import run_command


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = run_command([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err
