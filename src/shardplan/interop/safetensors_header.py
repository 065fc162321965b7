"""The header of a safetensors file: its entries, and the invariants that make a file readable without a doubt.

A file is an unsigned little-endian 64-bit header length n, n bytes of JSON, then the tensors' bytes. The header maps
each name to `{"dtype", "shape", "data_offsets": [begin, end]}`, with offsets counted from the end of the header, and
`"__metadata__"`, if it is there, to a map of text to text.

Invariants: a name stands once; every tensor's byte range has exactly the length that its shape and dtype ask for; the
ranges are disjoint, and together they cover the file from the end of the header to its last byte.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shardplan.errors import LONGEST, ParseError, ShardplanError

Array = NDArray[Any]
Read = Callable[[memoryview, int, str], None]
"""Fills a buffer from a position of the file; the text says what it is to hold."""

# File's name of a dtype -> (our name, numpy's dtype). Types below a byte (F4, F6) have no numpy dtype of their width.
_DTYPES: Mapping[str, tuple[str, np.dtype[Any]]] = {
    "BOOL": ("bool", np.dtype(np.bool_)),
    "U8": ("u8", np.dtype("u1")),
    "I8": ("i8", np.dtype("i1")),
    "F8_E5M2": ("f8e5m2", np.dtype(ml_dtypes.float8_e5m2)),
    "F8_E4M3": ("f8e4m3", np.dtype(ml_dtypes.float8_e4m3fn)),
    "F8_E8M0": ("f8e8m0", np.dtype(ml_dtypes.float8_e8m0fnu)),
    "F8_E4M3FNUZ": ("f8e4m3fnuz", np.dtype(ml_dtypes.float8_e4m3fnuz)),
    "F8_E5M2FNUZ": ("f8e5m2fnuz", np.dtype(ml_dtypes.float8_e5m2fnuz)),
    "I16": ("i16", np.dtype("<i2")),
    "U16": ("u16", np.dtype("<u2")),
    "F16": ("f16", np.dtype("<f2")),
    "BF16": ("bf16", np.dtype(ml_dtypes.bfloat16)),
    "I32": ("i32", np.dtype("<i4")),
    "U32": ("u32", np.dtype("<u4")),
    "F32": ("f32", np.dtype("<f4")),
    "C64": ("c64", np.dtype("<c8")),
    "F64": ("f64", np.dtype("<f8")),
    "I64": ("i64", np.dtype("<i8")),
    "U64": ("u64", np.dtype("<u8")),
}
NUMPY: Mapping[str, np.dtype[Any]] = dict[str, np.dtype[Any]](_DTYPES.values())
_FILE_NAME = {dtype: name for name, (_, dtype) in _DTYPES.items()}

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_ALIGNED = 8  # bytes of the widest dtype: the data start at a multiple of it
_LARGEST_HEADER = 100_000_000  # the format's own bound
_LARGEST_NDIM = 64  # numpy's bound
_LARGEST_BYTES = 2**63 - 1  # the largest file offset
SHOWN = 20  # names that an error lists
SHOWN_BYTES = 8  # of a header that is none


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: what it is and where its bytes lie."""

    dtype: str  # the short name of the element type, such as `f32`, `bf16` or `f8e4m3`
    shape: tuple[int, ...]
    begin: int  # position in the file of the first byte
    end: int  # position in the file after the last byte; `end - begin` is what shape and dtype ask for

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    tensors: Mapping[str, TensorEntry]  # by name, in the order of the header
    metadata: Mapping[str, str]  # the free text that the writer left, by key
    data_begin: int  # position in the file of the first byte after the header


def encode(path: Path, arrays: Sequence[tuple[str, Array]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file before its first tensor, a multiple of 8: the length of the header, and the header.

    `arrays` are names and arrays in the order in which their bytes will follow, `metadata` is free text by key. Raises
    `ShardplanError`, which names the file `path`, where a name, a dtype or the metadata cannot be written.
    """
    header: dict[str, object] = {}
    if metadata:
        for key, value in metadata.items():
            if not _is_text(key) or not _is_text(value):
                raise ShardplanError(f"cannot write {path}: metadata {key!r}: {value!r}; legal: text by text")
        header[_METADATA] = {key: metadata[key] for key in sorted(metadata)}
    end = 0
    for name, array in arrays:
        if not _is_text(name) or name == _METADATA:
            raise ShardplanError(f"cannot write {path}: tensor name {name!r}; legal: text other than {_METADATA!r}")
        file_name = _FILE_NAME.get(array.dtype.newbyteorder("<"))
        if file_name is None:
            legal = listing([str(dtype) for dtype in _FILE_NAME])
            raise ShardplanError(f"cannot write {path}: tensor {name!r} has dtype {array.dtype}; legal: {legal}")
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": file_name, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    if len(text) > _LARGEST_HEADER:
        raise ShardplanError(f"cannot write {path}: its header has {len(text)} bytes; legal: at most {_LARGEST_HEADER}")
    return struct.pack("<Q", len(text)) + text


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and len(value.encode()) >= 0
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def fail(path: Path, what: str) -> NoReturn:
    """Raise the `ParseError` that says what is wrong with a file."""
    raise ParseError(f"safetensors file {path} {what}") from None


def listing(names: Sequence[str]) -> str:
    """Return names for an error, the first `SHOWN` of them."""
    more = f", ... ({len(names)} in all)" if len(names) > SHOWN else ""
    return ", ".join(repr(name) for name in names[:SHOWN]) + more if names else "none"


def decode(path: Path, read: Read, size: int) -> Header:
    """Return the header of a file of `size` bytes, every invariant checked.

    `read` reads from it by position. Raises `ParseError`, which names the file `path`, where it breaks the format.
    """
    if size < _LENGTH_BYTES:
        fail(path, f"has {size} bytes; legal: at least {_LENGTH_BYTES}, the length of its header")
    prefix = bytearray(_LENGTH_BYTES)
    read(memoryview(prefix), 0, "the header's length")
    length: int = struct.unpack("<Q", prefix)[0]
    legal = min(size - _LENGTH_BYTES, _LARGEST_HEADER)
    if length > legal:
        fail(path, f"says its header has {length} bytes, but has {size} bytes itself; legal: at most {legal}")
    raw = bytearray(length)
    read(memoryview(raw), _LENGTH_BYTES, "the header")
    fields = _decode_json(path, bytes(raw))
    metadata = _decode_metadata(path, fields.pop(_METADATA, {}))
    data_begin = _LENGTH_BYTES + length
    tensors = {name: _decode_entry(path, name, value, data_begin) for name, value in fields.items()}
    _check_cover(path, tensors, data_begin, size)
    return Header(MappingProxyType(tensors), MappingProxyType(metadata), data_begin)


class _BadJson(ValueError):
    """What the JSON grammar allows and this format does not."""


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON, whose keys must be text and stand once."""
    table = dict(pairs)
    for key in table:
        if not _is_text(key):
            raise _BadJson(f"the key {key!r} is no Unicode text")
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise _BadJson(f"the key {twice!r} stands twice in one object; legal: once")
    return table


def _constant(text: str) -> NoReturn:
    raise _BadJson(f"{text} is no JSON number")


def _decode_json(path: Path, raw: bytes) -> dict[str, object]:
    if not raw.startswith(b"{"):
        fail(path, f"has a header that begins with {raw[:SHOWN_BYTES]!r}; legal: a JSON object, from its '{{' on")
    try:
        # A JSON object at the top, as its first byte says.
        return json.loads(raw.decode(), object_pairs_hook=_pairs, parse_constant=_constant)
    except UnicodeDecodeError as error:
        fail(path, f"has a header that is not UTF-8 at its byte {error.start}")
    except json.JSONDecodeError as error:
        fail(path, f"has a header that is not JSON at its character {error.pos}: {error.msg}")
    except RecursionError:
        fail(path, "has a header of JSON nested too deep; legal: 3 levels")
    except ValueError as error:  # _BadJson, and a number of more digits than Python converts
        fail(path, f"has a bad header: {error}")


def _decode_metadata(path: Path, value: object) -> dict[str, str]:
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        if all(_is_text(text) for text in table.values()):
            return cast("dict[str, str]", table)
    fail(path, f"has {_METADATA} {_short_json(value)}; legal: an object of text by text")


def _decode_entry(path: Path, name: str, value: object, data_begin: int) -> TensorEntry:
    """Check one tensor's entry by itself; that it fits the others is `_check_cover`."""
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(value, dict) or set(cast("dict[str, object]", value)) != keys:
        fail(
            path,
            f"describes tensor {name!r} as {_short_json(value)}; legal: an object of dtype, shape and data_offsets",
        )
    table = cast("dict[str, object]", value)
    known = _DTYPES.get(table["dtype"]) if isinstance(table["dtype"], str) else None
    if known is None:
        fail(path, f"gives tensor {name!r} dtype {_short_json(table['dtype'])}; legal: {', '.join(_DTYPES)}")
    shape = _naturals(table["shape"])
    if shape is None or len(shape) > _LARGEST_NDIM:
        legal = f"at most {_LARGEST_NDIM} whole numbers, 0 or more"
        fail(path, f"gives tensor {name!r} shape {_short_json(table['shape'])}; legal: {legal}")
    dtype, numpy_dtype = known
    if math.prod(n or 1 for n in shape) * numpy_dtype.itemsize > _LARGEST_BYTES:
        fail(path, f"gives tensor {name!r} shape {_short_json(list(shape))}; legal: at most {_LARGEST_BYTES} bytes")
    offsets = _naturals(table["data_offsets"])
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        legal = "[begin, end] with 0 <= begin <= end"
        fail(path, f"gives tensor {name!r} data_offsets {_short_json(table['data_offsets'])}; legal: {legal}")
    begin, end = offsets
    nbytes = math.prod(shape) * numpy_dtype.itemsize
    if end - begin != nbytes:
        asked = f"{dtype} of shape {list(shape)}"
        fail(path, f"gives tensor {name!r} {end - begin} bytes, [{begin}, {end}]; legal: {nbytes}, being {asked}")
    return TensorEntry(dtype, shape, data_begin + begin, data_begin + end)


def _naturals(value: object) -> tuple[int, ...] | None:
    """The whole numbers of a JSON list, None where it is no list of such."""
    if not isinstance(value, list):
        return None
    items = cast("list[object]", value)
    numbers = tuple(item for item in items if type(item) is int and item >= 0)  # a bool is an int, a float is not
    return numbers if len(numbers) == len(items) else None


def _check_cover(path: Path, tensors: Mapping[str, TensorEntry], data_begin: int, size: int) -> None:
    """Refuse tensors that overlap, or leave bytes between the header and the end of the file to nobody."""
    at, before = data_begin, "the header"
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        begin, end = entry.begin - data_begin, entry.end - data_begin
        if entry.begin != at:
            wrong = "overlaps" if entry.begin < at else "leaves a gap after"
            fail(
                path, f"has tensor {name!r} at [{begin}, {end}], which {wrong} {before}; legal: from {at - data_begin}"
            )
        if entry.end > size:
            legal = f"up to {size - data_begin}, where the file ends (is it truncated?)"
            fail(path, f"has tensor {name!r} at [{begin}, {end}], beyond its end; legal: {legal}")
        at, before = entry.end, f"tensor {name!r}"
    if at != size:
        fail(path, f"has {size - at} bytes after {before} that belong to no tensor; legal: none")


def _short_json(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
