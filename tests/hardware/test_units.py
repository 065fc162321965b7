"""Unit strings: parsing, formatting, errors."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.errors import LayoutError, ParseError
from shardplan.hardware.units import (
    exact,
    format_bytes,
    format_rate,
    format_seconds,
    limit_of,
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("parser", "text", "value"),
    [
        (parse_rate, "450 GB/s", 450e9),
        (parse_rate, "100 Gbit/s", 12.5e9),
        (parse_rate, "100Gb/s", 12.5e9),
        (parse_rate, "2.0 TB/s", 2e12),
        (parse_rate, "1 KiB/s", 1024.0),
        (parse_seconds, "2 us", 2e-6),
        (parse_seconds, "2 µs", 2e-6),
        (parse_seconds, "1.5e3 ns", 1.5e-6),
        (parse_flops, "19.5 TFLOP/s", 19.5e12),
        (parse_flops, "624 TOP/s", 624e12),
        (parse_bytes, "80 GB", 80e9),
        (parse_bytes, " 4 GiB ", 4 * 2.0**30),
        (parse_bytes, ".5 kB", 500.0),
    ],
)
def test_parse(parser, text, value):
    assert parser(text) == value


@pytest.mark.parametrize(
    ("parser", "text", "message"),
    [
        (
            parse_rate,
            "450 GB",
            "'GB' is no unit of bytes per second; legal: B/s, kB/s, MB/s, GB/s, TB/s, GiB/s, Mbit/s, Gbit/s\n"
            "  450 GB\n      ^",
        ),
        (parse_seconds, "2", "a number of seconds needs a unit; legal: s, ms, us, ns\n  2\n   ^"),
        (
            parse_bytes,
            "many GB",
            "expected a non-negative number and a unit (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB), got 'many GB'\n"
            "  many GB\n  ^",
        ),
        (
            parse_flops,
            "-1 TFLOP/s",
            "expected a non-negative number and a unit (FLOP/s, GFLOP/s, TFLOP/s, PFLOP/s, TOP/s), got '-1 TFLOP/s'\n"
            "  -1 TFLOP/s\n  ^",
        ),
        (parse_bytes, "1e999 GB", "'1e999 GB' is too large for a float\n  1e999 GB\n  ^"),
    ],
)
def test_errors_point_at_the_character(parser, text, message):
    with pytest.raises(ParseError) as caught:
        parser(text)
    assert str(caught.value) == message


def test_format():
    assert format_bytes(1234567) == "1.23 MB"
    assert format_bytes(999_999) == "1 MB"
    assert format_bytes(0) == "0 B"
    assert format_bytes(512) == "512 B"
    assert format_bytes(80e9) == "80 GB"
    assert format_bytes(2.5e18) == "2500 PB"
    assert format_rate(450e9) == "450 GB/s"
    assert format_seconds(0) == "0 s"
    assert format_seconds(2e-6) == "2 us"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(90) == "90 s"
    assert format_seconds(12345.0) == "12300 s"
    assert format_seconds(float("inf")) == "inf ns"


positive = st.floats(min_value=1e-12, max_value=1e20, allow_nan=False)


@given(positive)
def test_exact_text_parses_to_the_same_float(value):
    assert parse_rate(exact(value, "B/s")) == value
    assert parse_bytes(exact(value, "B")) == value
    assert parse_flops(exact(value, "FLOP/s")) == value
    assert parse_seconds(exact(value, "s")) == value
    assert parse_seconds(exact(0.0, "s")) == 0


@pytest.mark.parametrize(("said", "limit"), [(None, None), (7, 7), (7.0, 7), ("1.5 kB", 1500), ("1.5 B", 1)])
def test_a_limit_is_whole_bytes(said: object, limit: int | None) -> None:
    assert limit_of("limit", said) == limit


@pytest.mark.parametrize("said", [7.5, True, math.inf, math.nan, "0.5 B", 0, -1])
def test_what_is_no_limit_is_refused(said: object) -> None:
    with pytest.raises(LayoutError, match="the limit is "):
        limit_of("limit", said)
