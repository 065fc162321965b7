"""Folded print-outs have the words of the whole ones, in lines of 80; code says the same."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardplan as sp
from shardplan.report.fold import WIDTH, fold_lines, fold_python, fold_shell

WORDS = st.lists(st.text("abcdef,;:[]@%=", min_size=1, max_size=12), min_size=1, max_size=60)


@given(st.sampled_from(["", "  ", "cause    ", "  1   3 ms  ", "%"]), WORDS)
def test_words_stay_and_lines_are_short(before: str, words: list[str]) -> None:
    text = before + " ".join(words)
    folded = fold_lines(text)
    assert folded.split() == text.split()
    assert all(len(line) <= WIDTH for line in folded.split("\n"))
    assert fold_lines(folded) == folded


def test_prose_goes_on_below_itself() -> None:
    text = "cause    " + "word " * 30 + "end"
    first, *rest = fold_lines(text).split("\n")
    assert first.startswith("cause    word") and rest
    assert all(line.startswith(" " * 9 + "word") for line in rest)


def test_a_step_has_its_types_under_its_op() -> None:
    mesh = sp.Mesh(data=2, tensor=3)
    source, target = (sp.TensorType.parse(t, mesh) for t in ("i32[6@(data,tensor), 6]", "i32[6, 6@tensor]"))
    text = str(sp.redistribute(source, target))
    assert max(map(len, text.split("\n"))) > WIDTH
    assert fold_lines(text).split("\n")[3:6] == [
        "  %1 = all_to_all(%0; src_dim=0, dst_dim=1, axes=(tensor)):",
        "       i32[6@data, 6@tensor]  # 16 B, 10 us",
        "  %2 = all_gather(%1; dim=0, axes=(data)): i32[6, 6@tensor]  # 24 B, 5 us",
    ]


def test_a_command_in_prose_can_be_copied() -> None:
    command = "shardplan place --mesh dp=2,tp=8 --traffic tp=all_to_all:29360128B*1 --topology dgx-h100 --nodes 2"
    lines = fold_lines(f"better     placing dp inside one node would take 614 us: `{command}`").split("\n")
    assert all(len(line) <= WIDTH for line in lines)
    copied = lines[1:]  # below the prose
    assert len(copied) > 1 and all(line.endswith(" \\") for line in copied[:-1]), lines
    assert shlex.split("\n".join(copied).replace("\\\n", " ")) == shlex.split(command)


@given(WORDS, st.integers(20, WIDTH))
def test_python_says_the_same(words: list[str], width: int) -> None:
    names = ", ".join(f"g(x{k}, [{len(word)}, 'a, b'])" for k, word in enumerate(words))
    code = f"a = f({names})  # why"
    assert ast.dump(ast.parse(fold_python(code, width))) == ast.dump(ast.parse(code))
    assert fold_python(code, len(code)) == code


@given(WORDS, st.integers(20, WIDTH))
def test_a_shell_reads_the_same_words(words: list[str], width: int) -> None:
    text = "run " + " ".join(map(shlex.quote, words)) + " 'a b  c'"
    folded = fold_shell(text, width)
    assert shlex.split(folded.replace(" \\\n", " ")) == shlex.split(text)
    assert all(len(line) <= width for line in folded.split("\n"))


def test_a_comment_goes_in_front() -> None:
    assert fold_python("  call(one, two)  # why so", 20) == "  # why so\n  call(one, two)"


@pytest.mark.parametrize("fold", [fold_python, fold_shell])
def test_a_long_comment_stays_one(fold: Callable[[str, int], str]) -> None:
    text = "  # " + "word " * 20 + "end"
    folded = fold(text, 40).split("\n")
    assert len(folded) > 1 and all(line.startswith("  # word") and len(line) <= 40 for line in folded)
    assert " ".join(line[4:] for line in folded) == text[4:]


def test_a_long_comment_behind_code_goes_in_front() -> None:
    assert fold_python("call(one, two)  # why it is so", 14) == "# why it is so\ncall(one, two)"
    assert fold_python("call(one, two)  # why it is so", 10).startswith("# why it\n# is so\ncall(one,\n")
