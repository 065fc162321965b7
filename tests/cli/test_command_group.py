"""What a user sees first: six commands in front, lines within 80 columns, and in each help an example that is legal."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

import shardplan
from shardplan.cli import app, main, run_command
from shardplan.cli.command_group import COMMANDS, FRONT, MORE

GROUP: Any = get_command(app)
WIDTH = 80


def commands(group: Any = GROUP, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that lead to it, those of groups too."""
    for name, command in group.commands.items():
        yield (*before, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))


EVERY = {" ".join(words): command for words, command in commands()}


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run_command([*words, "--help"]) == 0
    return capsys.readouterr().out


def test_every_command_has_a_line_and_an_example() -> None:
    assert COMMANDS.keys() == EVERY.keys()


def test_six_commands_are_in_front_and_the_others_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    front, _, rest = helped(capsys).partition("\nCommands:\n")[2].partition(f"\n{MORE}:\n")
    listed = [re.findall(r"^  (\S+)  ", part.partition("\n\n")[0], re.M) for part in (front, rest)]
    assert listed[0] == list(FRONT)
    assert sorted(itertools.chain(*listed)) == sorted(GROUP.commands)


@pytest.mark.parametrize("name", ["", *EVERY])
def test_helps_fit_80_columns_and_cut_no_sentence(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = helped(capsys, *name.split())
    shown = text.partition("\n\n")[2]
    assert [line for line in shown.splitlines() if len(line) > WIDTH or line.endswith("...")] == []
    copied = re.sub(r" \\\n +", " ", text)
    assert name == "lab" or not name or f"  {COMMANDS[name][1]}\n" in copied


@pytest.mark.parametrize("name", [name for name in EVERY if not hasattr(EVERY[name], "commands")])
def test_an_example_is_legal(name: str) -> None:
    tool, *words = shlex.split(COMMANDS[name][1])
    assert tool == "shardplan" and words[: len(name.split())] == name.split()
    context: Any = GROUP.make_context("shardplan", list(words), resilient_parsing=False)
    group, rest = GROUP, [*context._protected_args, *context.args]
    while rest and hasattr(group, "commands"):
        word, group, rest = group.resolve_command(context, rest)
        context = group.make_context(word, list(rest), parent=context)
        rest = [*context._protected_args, *context.args] if hasattr(group, "commands") else []
    assert not hasattr(group, "commands")


@pytest.mark.parametrize(
    ("given", "as_if"),
    [
        (["f32[8@x]", "f32[8]", "--mesh", "x=2"], "redistribute"),
        (["--mesh", "x=2", "f32[8@x]", "f32[8]"], "redistribute"),
        (["vllm,tp=2", "hf", "--config", "nowhere"], "refit"),
    ],
)
def test_move_is_what_it_is_given(given: list[str], as_if: str, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[tuple[int, str]] = []
    for name in ("move", as_if):
        status = run_command([name, *given, "--json"])
        said.append((status, capsys.readouterr().out))
    assert said[0] == said[1]


def test_move_of_nothing_and_convert(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["move"]) == 2
    assert "legal are two types, or two sides of weights" in capsys.readouterr().err
    said: list[tuple[int, Any]] = []
    for name in ("convert", "reshard"):
        status = run_command([name, "nowhere", "there", "--to", "hf", "--json"])
        said.append((status, json.loads(capsys.readouterr().out)))
    assert said[0] == said[1] and said[0][0] == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("typed", "named"),
    [("pl", {"plan", "place"}), ("plan --no", {"--nodes", "--no-prune"}), ("plan --on dgx-h", {"dgx-h100", "dgx-h200"}),
     ("plan llama3-4", {"llama3-405b"}), ("lab s", {"sweep"})],
)  # fmt: skip
def test_shells_complete_names(
    shell: str, typed: str, named: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the scripts of `--install-completion` ask; fish also asks whether there is anything, by the status."""
    words = f"shardplan {typed}"
    asked = {"_SHARDPLAN_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1),
             "_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["shardplan"])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which a command sets

    def completed(more: dict[str, str]) -> tuple[object, str]:
        for name, value in (asked | more).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr().out

    status, printed = completed({})
    listed = printed.removeprefix("_arguments '*: :((")
    found = set(re.findall(r'^"([^"\n]+)"' if shell == "zsh" else r"^(\S+)", listed, re.M))
    assert status == 0 and found == named, printed
    for word, status in ((typed, 0), ("plan --zzz", 1)):
        asks = {"_TYPER_COMPLETE_FISH_ACTION": "is-args", "_TYPER_COMPLETE_ARGS": f"shardplan {word}"}
        assert shell != "fish" or completed(asks)[0] == status


def test_names_of_the_package_are_public_ones() -> None:
    assert dir(shardplan) == sorted(shardplan.__all__)
