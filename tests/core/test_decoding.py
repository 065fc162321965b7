"""Files from elsewhere: every reason for which they say nothing, in one line."""

from pathlib import Path

import msgspec
import pytest

from shardplan.core.decoding import decode_json, decode_toml, read_bytes, read_text
from shardplan.errors import ParseError


class Row(msgspec.Struct):
    """A row."""

    size: int


def test_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes("a\r\nµ".encode())
    assert read_bytes(path) == "a\r\nµ".encode() and read_text(path) == "a\r\nµ"
    assert decode_json(b'{"size": 3}', Row) == Row(3) and decode_json("[1, null]") == [1, None]
    assert decode_toml("x = 3") == {"x": 3}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(ParseError) as error:
            read_text(path)
        assert str(error.value) == f"cannot read {path}: {reason}"
    with pytest.raises(ParseError, match=r"^cannot read the trace: embedded null byte$"):
        read_bytes("x\0", "the trace")
    (tmp_path / "file").write_bytes(b"ab\xff")
    with pytest.raises(ParseError, match=r"^the log is no UTF-8 text at its byte 2; legal is a log$"):
        read_text(tmp_path / "file", "the log", "a log")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ('{"x": ' * 100_000, "its values are nested too deep"),
        ('{"size": ', "Input data was truncated"),
        ('{"size": "x"}', "Expected `int`, got `str` - at `$.size`"),
    ],
)
def test_what_is_no_json(data: bytes | str, reason: str) -> None:
    with pytest.raises(ParseError) as error:
        decode_json(data, Row)
    assert str(error.value) == reason


def test_what_is_no_text_is_no_json() -> None:
    for data in (b'"\xff"', b'{"\xff": 3}'):
        with pytest.raises(ParseError, match=r"^it is no UTF-8 text$"):
            decode_json(data)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = " + "[" * 100_000, "its values are nested too deep"),
        ("x = " + "9" * 5000, "a number has more than 4300 digits"),
        ("x = ", "Invalid value (at end of document)"),
    ],
)
def test_what_is_no_toml(text: str, reason: str) -> None:
    with pytest.raises(ParseError) as error:
        decode_toml(text)
    assert str(error.value) == reason
