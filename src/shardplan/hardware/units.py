"""Unit strings of users: parsed to SI floats, and printed from them.

Inside shardplan every quantity is a float in bytes, bytes per second, seconds or operations per second. Only files and
print-outs carry units. Decimal prefixes are powers of 1000 (`GB`), binary ones powers of 1024 (`GiB`), and bits are
written out (`Gbit/s`) or with a small b (`Gb/s`).
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

import numpy as np

from shardplan.core import validation
from shardplan.errors import LayoutError, ParseError, excerpt

_DIGITS = 3  # of printed numbers: more than a prediction is good for
_PLAIN = 20  # characters up to which an exact number is written without an exponent; a float has 17 digits
_NUMBER = re.compile(r"\s*((?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*")
# By prefix the power of 10, or of 1024, that it stands for; ascending, as printing takes the last one that fits.
_DECIMAL = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5}


def _scales(base: str, per: str = "", bits: bool = False) -> dict[str, Decimal]:
    table = {f"{prefix}{base}{per}": Decimal(10) ** power for prefix, power in _DECIMAL.items()}
    if base == "B":
        table |= {f"{prefix}B{per}": Decimal(1024) ** power for prefix, power in _BINARY.items()}
    if bits:
        for word in ("bit", "b"):
            table |= {f"{prefix}{word}{per}": Decimal(10) ** power / 8 for prefix, power in _DECIMAL.items()}
    return table


_TIME_POWERS = {"ns": -9, "us": -6, "ms": -3, "s": 0}
_SECONDS = {unit: Decimal(10) ** power for unit, power in (_TIME_POWERS | {"µs": -6}).items()}
_BYTES = _scales("B")
_RATES = _scales("B", "/s", bits=True)
_FLOPS = _scales("FLOP", "/s") | _scales("OP", "/s")

# What an error offers: of every kind the ones in use.
_SHOWN: dict[str, tuple[str, ...]] = {
    "bytes": ("B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"),
    "bytes per second": ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "GiB/s", "Mbit/s", "Gbit/s"),
    "seconds": ("s", "ms", "us", "ns"),
    "operations per second": ("FLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s", "TOP/s"),
}
_TABLES = {"bytes": _BYTES, "bytes per second": _RATES, "seconds": _SECONDS, "operations per second": _FLOPS}


def _parse(text: str, quantity: str) -> float:
    legal = ", ".join(_SHOWN[quantity])
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ParseError(f"a text with a number and a unit ({legal}) is read here, got {excerpt(text)}")
    found = _NUMBER.match(text)
    if found is None:
        start = len(text) - len(text.lstrip())
        raise ParseError(f"expected a non-negative number and a unit ({legal}), got {text!r}", text, start)
    unit = text[found.end() :].rstrip()
    scale = _TABLES[quantity].get(unit)
    if scale is None:
        wrong = f"{unit!r} is no unit of {quantity}" if unit else f"a number of {quantity} needs a unit"
        raise ParseError(f"{wrong}; legal: {legal}", text, found.end())
    value = float(Decimal(found[1]) * scale)
    if not math.isfinite(value):
        raise ParseError(f"{text!r} is too large for a float", text, found.start(1))
    return value


def parse_bytes(text: str) -> float:
    """Return the bytes that a text such as `80 GB` says; raises `ParseError` at the character.

    >>> parse_bytes("4 GiB")
    4294967296.0
    """
    return _parse(text, "bytes")


def bytes_of(what: str, value: object) -> float:
    """Return a number of bytes, finite and 0 or more, given as one or as text; `what` names the argument in errors.

    Raises `LayoutError` for another value, `ParseError` at the character of a text.

    >>> bytes_of("nbytes", "64 MB")
    64000000.0
    """
    return parse_bytes(value) if isinstance(value, str) else validation.number(f"{what}, in bytes,", value)


def limit_of(what: str, value: object) -> int | None:
    """Return a limit in whole bytes, given as a whole number of at least 1 or as text; None stays None.

    Of a text such as `1.5 B` the whole bytes count. `what` names the argument in errors: `LayoutError` for another
    value, `ParseError` at the character of a text.

    >>> limit_of("memory limit", "1 GB")
    1000000000
    """
    if value is None:
        return None
    if isinstance(value, str):
        limit = int(parse_bytes(value))
    elif isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        number = value if isinstance(value, int) else float(value)
        limit = int(number) if abs(number) <= validation.MOST and number == int(number) else None
    else:
        limit = None
    if limit is None or limit > validation.MOST:
        raise LayoutError(
            f"the {what} is {excerpt(value)}; legal is a whole number of bytes, its text such as '1 GB', or None"
        )
    if limit < 1:
        raise LayoutError(f"the {what} is {limit} bytes; it must be at least 1")
    return limit


def parse_rate(text: str) -> float:
    """Return the bytes per second that a text such as `450 GB/s` says; raises `ParseError` at the character.

    >>> parse_rate("100 Gbit/s")
    12500000000.0
    """
    return _parse(text, "bytes per second")


def parse_seconds(text: str) -> float:
    """Return the seconds that a text such as `2 us` says; raises `ParseError` at the character.

    >>> parse_seconds("2 us")
    2e-06
    """
    return _parse(text, "seconds")


def parse_flops(text: str) -> float:
    """Return the operations per second that a text such as `312 TFLOP/s` says; raises `ParseError` at the character.

    >>> parse_flops("19.5 TFLOP/s")
    19500000000000.0
    """
    return _parse(text, "operations per second")


def _format(value: float, steps: tuple[tuple[str, float], ...]) -> str:
    """The text of a value in the largest of the steps, (unit, size) ascending, of which it has at least one."""
    if not math.isfinite(value):
        return f"{value} {steps[0][0]}"
    # Round first, so that 999,999 is 1 MB and never 1e+03 kB.
    rounded = float(f"{value:.{_DIGITS}g}")
    unit, scale = steps[0]
    for name, size in steps:
        if abs(rounded) >= size:
            unit, scale = name, size
    number = f"{rounded / scale:.{_DIGITS}g}"
    # Above the last step there is no larger unit: 5000 s, not 5e+03 s.
    return f"{float(number):.0f} {unit}" if "e+" in number else f"{number} {unit}"


_BYTE_STEPS = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12), ("PB", 1e15))
_TIME_STEPS = (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0))


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes as text: three digits and a decimal prefix.

    >>> format_bytes(1234567)
    '1.23 MB'
    """
    return _format(float(nbytes), _BYTE_STEPS)


def format_rate(bytes_per_second: float) -> str:
    """Return a bandwidth as text: three digits and a decimal prefix.

    >>> format_rate(4.5e11)
    '450 GB/s'
    """
    return _format(float(bytes_per_second), _BYTE_STEPS) + "/s"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: three digits, in s, ms, us or ns.

    >>> format_seconds(0.00123)
    '1.23 ms'
    """
    return "0 s" if seconds == 0 else _format(float(seconds), _TIME_STEPS)


def exact(value: float, unit: str) -> str:
    """Return the text of a value in an SI unit, finite and not negative, that parsing makes the same float of.

    `unit` is `B`, `B/s`, `FLOP/s` or `s`; the text has the largest prefix of which it is at least one.

    >>> exact(25e9, "B/s")
    '25 GB/s'
    """
    number = Decimal(repr(float(value)))
    if unit == "s":
        steps = list(_TIME_POWERS.items())
    else:
        steps = [(f"{prefix}{unit}", power) for prefix, power in _DECIMAL.items()]
    name, power = steps[0]
    if number == 0:
        return f"0 {unit}"
    for candidate, size in steps:
        if number >= Decimal(10) ** size:
            name, power = candidate, size
    scaled = number.scaleb(-power).normalize()
    plain = format(scaled, "f")
    return f"{plain if len(plain) <= _PLAIN else scaled} {name}"
