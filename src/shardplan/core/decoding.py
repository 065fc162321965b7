"""Files from elsewhere as bytes, text, JSON or TOML: what they say, or one line that says why they say nothing.

What can be wrong before a field is looked at is caught here, once for all readers: no file, a folder, bytes that are no
UTF-8, brackets nested deeper than Python recurses, numbers of more digits than it converts.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

from shardplan.errors import ParseError, line

T = TypeVar("T")
_DEEP = "its values are nested too deep"
_DIGITS = 4300  # of a number; Python converts no longer ones


def read_bytes(path: str | Path, what: str = "") -> bytes:
    """Return the bytes of a file; raises `ParseError`, which calls it `what`, where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ParseError(f"cannot read {what or line(path)}: {error.strerror}") from None
    except ValueError as error:  # a path with a NUL
        raise ParseError(f"cannot read {what or line(path)}: {error}") from None


def read_text(path: str | Path, what: str = "", legal: str = "UTF-8 text") -> str:
    """Return the text of a file; raises `ParseError`, which says what is legal, where it is none."""
    return decode_text(read_bytes(path, what), what or line(path), legal)


def decode_text(data: bytes, what: str, legal: str = "UTF-8 text") -> str:
    """Return bytes as text, line ends as they are; raises `ParseError` where they are no UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ParseError(f"{what} is no UTF-8 text at its byte {error.start}; legal is {legal}") from None


@overload
def decode_json(data: bytes | str) -> Any: ...
@overload
def decode_json(data: bytes | str, kind: type[T]) -> T: ...
def decode_json(data: bytes | str, kind: Any = Any) -> Any:
    """Return what JSON says, as a value of a kind; raises `ParseError` with the reason where it is none.

    >>> decode_json('{"x": [1, 2.5]}')
    {'x': [1, 2.5]}
    >>> decode_json("[" * 100000)
    Traceback (most recent call last):
    shardplan.errors.ParseError: its values are nested too deep
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ParseError(_DEEP) from None
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        utf8 = isinstance(error, UnicodeDecodeError) or "Invalid UTF-8" in str(error)  # msgspec until 0.22, and since
        raise ParseError("it is no UTF-8 text" if utf8 else str(error)) from None


def decode_toml(text: str) -> dict[str, Any]:
    """Return what TOML says; raises `ParseError` with the reason where it is none.

    >>> decode_toml("x = " + "9" * 5000)
    Traceback (most recent call last):
    shardplan.errors.ParseError: a number has more than 4300 digits
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ParseError(_DEEP) from None
    except tomllib.TOMLDecodeError as error:
        raise ParseError(line(error)) from None
    except ValueError:
        raise ParseError(f"a number has more than {_DIGITS} digits") from None
