"""Print-outs within 80 columns: prose goes on under its text, a step under its op, and what is copied stays legal.

Lines that fit are left as they are. Of a longer one only spaces become ends of lines, and a backslash is added in
commands: so that the words are those of the library's text, which is not folded.
"""

from __future__ import annotations

import re
import textwrap
import tokenize
from collections.abc import Iterator
from io import StringIO

WIDTH = 80  # characters of a line
_STEP = re.compile(r"(?P<indent>\s*)(?P<call>%\S[^=]* = .*\)):\s+(?P<types>\w+\[.*?)(?:\s{2,}(?P<note># .*))?")
_LABEL = re.compile(r"\s*(?:\S+(?: \S+)*\s{2,})+?(?=\S)")
_COMMAND = re.compile(r"`(shardplan [^`]+)`")
_SHELL_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|\S)+""")
_MOST_HANGING = 24  # columns that a line goes on under at most; else behind its own beginning


def fold_lines(text: str) -> str:
    """Return a print-out in lines of at most 80 characters, but for a word, or a row of a picture, that is longer."""
    return "\n".join(part for line in text.split("\n") for part in _fold_line(line))


def fold_python(text: str, width: int = WIDTH) -> str:
    """Return Python code in lines of at most `width` characters where brackets let it; it says the same.

    A comment behind code that is too long goes in front of it; a long one goes on in another.

    >>> print(fold_python("a = f(one, (two, three))  # why", 20))
    # why
    a = f(one,
        (two, three))
    """
    return "\n".join(part for line in text.split("\n") for part in _fold_code(line, width))


def fold_shell(text: str, width: int = WIDTH) -> str:
    r"""Return a shell's commands in lines of at most `width` characters, each but the last with a backslash behind.

    A long comment goes on in another.

    >>> print(fold_shell("srun --ntasks=8 --nodes=2 'a b'", 20))
    srun --ntasks=8 \
      --nodes=2 'a b'
    """
    return "\n".join(part for line in text.split("\n") for part in _fold_command(line, width))


def _fold_line(line: str) -> Iterator[str]:
    if len(line) <= WIDTH:
        yield line
    elif step := _STEP.fullmatch(line):
        yield from _fold_step(step)
    elif command := _COMMAND.search(line):
        before, after = line[: command.start()].rstrip(), line[command.end() :].strip(" ")
        yield from _fold_prose(before)
        yield from _fold_command(f"  {command[1]}", WIDTH)
        if after.strip(".;,"):
            yield from _fold_line(f"  {after}")
    else:
        yield from _fold_prose(line)


def _fold_prose(line: str) -> Iterator[str]:
    """A label, then its text, which goes on below itself."""
    label = match[0] if (match := _LABEL.match(line)) else ""
    if not 0 < len(label) <= _MOST_HANGING:
        label = re.match(r"\s*", line)[0] + "  "  # type: ignore[index]
        yield from _wrap(line.lstrip(), label[:-2], label)
    else:
        yield from _wrap(line[len(label) :], label, " " * len(label))


def _wrap(text: str, first: str, then: str, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


def _fold_step(step: re.Match[str]) -> Iterator[str]:
    """A step of a program: its call, then its types, and what they cost behind them where that fits."""
    indent, note = step["indent"], step["note"] or ""
    whole = f"{indent}{step['call']}: {step['types']}"
    if len(whole) <= WIDTH:  # what made it long is the column of its note
        lines = [whole]
    else:
        under = f"{indent}     "
        lines = [*_wrap(f"{step['call']}:", indent, f"{under}  "), *_wrap(step["types"], under, under)]
    if note and len(lines[-1]) + 2 + len(note) <= WIDTH:
        lines[-1] += f"  {note}"
    elif note:
        lines.append(f"{indent}     {note}")
    yield from lines


def _fold_comment(line: str, width: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    return _wrap(line.lstrip(), indent, f"{indent}# ", width)


def _fold_command(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    if line.lstrip().startswith("#"):
        yield from _fold_comment(line, width)
        return
    indent = line[: len(line) - len(line.lstrip())]
    now, *words = _SHELL_WORD.findall(line)
    now = indent + now
    for word in words:
        if len(now) + len(word) + len("  \\") <= width:
            now += f" {word}"
        else:
            yield f"{now} \\"
            now = f"{indent}  {word}"
    yield now


def _fold_code(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    indent = line[: len(line) - len(line.lstrip())]
    code, breaks = line.lstrip(), dict[int, int]()  # where a line may end, and how deep in brackets that is
    try:
        depth = 0
        for token in tokenize.generate_tokens(StringIO(code).readline):
            if token.type == tokenize.COMMENT:
                yield from _fold_comment(indent + token.string, width)
                if before := code[: token.start[1]].rstrip():
                    yield from _fold_code(indent + before, width)
                return
            depth += (token.string in "([{") - (token.string in ")]}") if token.type == tokenize.OP else 0
            if depth and token.string == ",":
                breaks[token.end[1]] = depth
    except (tokenize.TokenError, IndentationError):  # it is no Python: as it stands
        breaks = {}
    first, begin = indent, 0
    while len(first) + len(code) - begin > width:
        fits = [k for k in breaks if begin < k <= begin + width - len(first)]
        if not fits:
            break
        end = min(fits, key=lambda k: (breaks[k], -k))
        yield first + code[begin:end]
        first, begin = f"{indent}    ", end + (code[end : end + 1] == " ")
    yield first + code[begin:]
