"""Pickles read as data: nothing is imported, called or built, whatever they say.

A pickle is a program, and to load one is to run it. Here its instructions make texts, numbers, tuples, lists and the
three values below, and no more. What it would import is compared with the names that the caller admits, module and
name both exact, and what it would call is said, and not called. Instructions that what we read is not written with are
refused, and so is a pickle that would grow much larger than its bytes: work and memory are proportional to these.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from shardplan.errors import ParseError, line

_MOST_PROTOCOL = 5
_MOST_NAME = 256  # bytes of a module's name, or of a name in it
_MOST_INTEGER = 8  # bytes of an integer that is written as bytes: sizes have 63 bits
_LEAST_VALUES, _BYTES_OF_VALUE = 1000, 4  # a value that holds others takes at least so many bytes of a pickle
Admitted = Collection[tuple[str, str]]


@dataclass(frozen=True, slots=True, eq=False)
class PickledName:
    """What a pickle would import: a name of a module."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class PickledRows:
    """What a pickle would make a dict of: keys and values in order. No key is hashed."""

    rows: list[tuple[Any, Any]]


@dataclass(slots=True, eq=False)
class PickledCall:
    """What a pickle would call, or make an instance of: with which arguments, and the state of the instance.

    `rows` are keys and values of one that is a dict.
    """

    of: PickledName
    arguments: tuple[Any, ...]
    state: Any = None
    rows: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])


def read_pickle(data: bytes, admitted: Admitted | None, persistent: bool = False) -> Any:
    """Return what a pickle says, as data.

    Args:
        data: the pickle, of protocol 2 to 5.
        admitted: the names that it may have, each with its module; None for any, none of which is looked up.
        persistent: whether it may refer to what lies beside it; such a reference is what it says of it.

    Raises:
        ParseError: another name or instruction, one that takes what is not there, or more values than its bytes allow.

    >>> import pickle
    >>> read_pickle(pickle.dumps(("w", [1, 2.5, None])), ())
    ('w', [1, 2.5, None])
    >>> read_pickle(pickle.dumps(print), ())
    Traceback (most recent call last):
        ...
    shardplan.errors.ParseError: the pickle names builtins.print at byte 31; legal is what torch writes there
    """
    reading = _Reading(data, admitted, persistent)
    collecting = gc.isenabled()
    gc.disable()  # what is read is all kept, and to look through it again and again takes longer than to read it
    try:
        return reading.run()
    except (IndexError, struct.error):  # of the stack, the memo, the marks or the bytes
        raise reading.fail("takes what is not there", "a whole pickle") from None
    except UnicodeDecodeError:
        raise reading.fail("has a text that is none", "UTF-8") from None
    finally:
        if collecting:
            gc.enable()


class _Reading:
    """One pickle while it is read: stack, marks and memo, as in the `pickle` module."""

    def __init__(self, data: bytes, admitted: Admitted | None, persistent: bool) -> None:
        self.data, self.admitted, self.persistent = data, admitted, persistent
        self.at = 0
        self.room = _LEAST_VALUES + len(data) // _BYTES_OF_VALUE
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each mark
        self.memo: list[Any] = []

    def fail(self, what: str, legal: str) -> ParseError:
        return ParseError(f"the pickle {what} at byte {self.at}; legal is {legal}")

    def run(self) -> Any:
        while True:
            code = self.data[self.at]
            self.at += 1
            step = _STEPS.get(code)
            if step is None:
                if code == _STOP:
                    return self.stack.pop()
                raise self.fail(f"has the instruction {code:#04x}", "what torch writes")
            step(self)

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) < count:
            raise self.fail(f"ends within {count} bytes", "a whole pickle")
        self.at += count
        return found

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def make(self, value: Any) -> None:
        """Push what holds other values."""
        self.room -= 1
        if self.room < 0:
            raise self.fail("has more values than its bytes allow", f"one in {_BYTES_OF_VALUE} bytes")
        self.stack.append(value)

    def pop_mark(self) -> list[Any]:
        """Take everything from the last mark on."""
        found, self.stack = self.stack, self.below.pop()
        return found

    def pop_values(self, count: int) -> tuple[Any, ...]:
        """Take so many of the last values."""
        if len(self.stack) < count:
            raise IndexError
        found = tuple(self.stack[-count:])
        del self.stack[-count:]
        return found

    def peek_value(self, kind: type) -> Any:
        """Look at the last value, of a kind."""
        value = self.stack[-1]
        if type(value) is not kind:
            raise self.fail(f"has a {type(value).__name__} where a {kind.__name__} must be", "what torch writes")
        return value

    def peek_dict(self) -> list[tuple[Any, Any]]:
        """Look at the rows of the last value, a dict; where any name may be, an instance can be one (OrderedDict)."""
        if self.admitted is None and isinstance(self.stack[-1], PickledCall):
            return self.stack[-1].rows
        return self.peek_value(PickledRows).rows

    # What instructions do

    def protocol(self) -> None:
        if not 2 <= (found := self.number("<B")) <= _MOST_PROTOCOL:
            raise self.fail(f"is of protocol {found}", f"2 to {_MOST_PROTOCOL}")

    def frame(self) -> None:
        self.take(8)  # how much to read at once, which is all there

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def integer(self) -> None:
        if (count := self.number("<B")) > _MOST_INTEGER:
            raise self.fail(f"has an integer of {count} bytes", f"at most {_MOST_INTEGER}")
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def text(self, form: str) -> None:
        self.push(self.take(self.number(form)).decode())

    def append(self) -> None:
        (value,) = self.pop_values(1)
        self.peek_value(list).append(value)

    def extend(self) -> None:
        values = self.pop_mark()
        self.peek_value(list).extend(values)

    def row(self) -> None:
        key, value = self.pop_values(2)
        self.peek_dict().append((key, value))

    def rows(self) -> None:
        values = self.pop_mark()
        if len(values) % 2:
            raise IndexError
        self.peek_dict().extend(zip(values[::2], values[1::2], strict=True))

    def push_name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.fail("names what is no text", "the name of a module, and one in it")
        if self.admitted is not None and (module, name) not in self.admitted:
            raise self.fail(f"names {line(f'{module[:_MOST_NAME]}.{name[:_MOST_NAME]}')}", "what torch writes there")
        self.make(PickledName(module, name))

    def name_in_lines(self) -> None:
        lines: list[str] = []
        for _ in range(2):
            end = self.data.find(b"\n", self.at, self.at + _MOST_NAME + 1)
            if end < 0:
                raise self.fail(f"has a name of more than {_MOST_NAME} bytes", "a shorter one")
            lines.append(self.take(end - self.at).decode())
            self.at += 1
        self.push_name(*lines)

    def call(self) -> None:
        arguments = self.peek_value(tuple)
        self.pop_values(1)
        of = self.peek_value(PickledName)
        self.pop_values(1)
        self.make(PickledCall(of, arguments))

    def state(self) -> None:
        (state,) = self.pop_values(1)
        made = self.peek_value(PickledCall)
        if made.state is not None:
            raise self.fail("gives an instance two states", "one")
        made.state = state

    def keep(self, number: int) -> None:
        if number != len(self.memo):  # in order, as they are written: no number asks for memory
            raise self.fail(f"keeps its value {len(self.memo)} as {number}", "in order")
        self.memo.append(self.stack[-1])

    def reference(self) -> None:
        if not self.persistent:
            raise self.fail("refers to what lies beside it", "what torch writes")


_STOP = ord(".")
_STEPS: dict[int, Callable[[_Reading], None]] = {
    0x94: lambda r: r.keep(len(r.memo)),
    ord("h"): lambda r: r.push(r.memo[r.number("<B")]),
    ord("j"): lambda r: r.push(r.memo[r.number("<I")]),
    ord("q"): lambda r: r.keep(r.number("<B")),
    ord("r"): lambda r: r.keep(r.number("<I")),
    ord("K"): lambda r: r.push(r.number("<B")),
    ord("M"): lambda r: r.push(r.number("<H")),
    ord("J"): lambda r: r.push(r.number("<i")),
    0x8A: _Reading.integer,
    ord("G"): lambda r: r.push(r.number(">d")),
    0x8C: lambda r: r.text("<B"),
    ord("X"): lambda r: r.text("<I"),
    ord("N"): lambda r: r.push(None),
    0x88: lambda r: r.push(True),
    0x89: lambda r: r.push(False),
    ord("("): _Reading.mark,
    ord(")"): lambda r: r.push(()),
    ord("t"): lambda r: r.make(tuple(r.pop_mark())),
    0x85: lambda r: r.make(r.pop_values(1)),
    0x86: lambda r: r.make(r.pop_values(2)),
    0x87: lambda r: r.make(r.pop_values(3)),
    ord("]"): lambda r: r.make([]),
    ord("a"): _Reading.append,
    ord("e"): _Reading.extend,
    ord("}"): lambda r: r.make(PickledRows([])),
    ord("s"): _Reading.row,
    ord("u"): _Reading.rows,
    ord("c"): _Reading.name_in_lines,
    0x93: lambda r: r.push_name(*r.pop_values(2)),
    0x81: _Reading.call,
    ord("R"): _Reading.call,
    ord("b"): _Reading.state,
    ord("Q"): _Reading.reference,
    0x80: _Reading.protocol,
    0x95: _Reading.frame,
}
