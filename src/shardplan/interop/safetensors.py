"""The safetensors file format, read and written with numpy alone.

A file is an unsigned little-endian 64-bit header length n, n bytes of JSON, then the tensors' bytes. The header maps each
name to `{"dtype", "shape", "data_offsets": [begin, end]}`, and `"__metadata__"`, if there, to a map of text to text.

Invariants, checked on opening and again by nothing later: every tensor's byte range has exactly the length that its shape
and dtype ask for, the ranges are disjoint, and together they cover the file from the end of the header to its last byte.
So whatever is read from an opened file is a tensor that was written. A file that breaks the format is a `ParseError`
of one line; nothing is read, or allocated, on the word of an unchecked header.

Reading is by position (`preadv`) into the result: no page of another tensor is touched, a box costs the bytes of the box,
and several threads may read from one `Checkpoint`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shardplan.errors import ParseError, ShardplanError

__all__ = ["Box", "Checkpoint", "Header", "TensorEntry", "box_runs", "open", "read_header", "write"]

Array = NDArray[Any]
Box = Sequence[tuple[int, int]]
"""Per dim the (start, stop) of a part of a tensor."""

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
_NUMPY = dict(_DTYPES.values())
_FILE_NAME = {dtype: name for name, (_, dtype) in _DTYPES.items()}

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # the format's own bound
_LARGEST_NDIM = 64  # numpy's
_LARGEST_BYTES = 2**63 - 1  # a file offset


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: what it is and where its bytes lie.

    Args:
        dtype: the name of the element type, such as `"f32"`, `"bf16"` or `"f8e4m3"`.
        shape: elements per dim; `()` is a scalar.
        begin: position in the file of the first byte.
        end: position in the file after the last byte; `end - begin` is what shape and dtype ask for.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Args:
        tensors: entry by name, in the order of the header.
        metadata: the free text that the writer left, by key.
        data_begin: position in the file of the first byte after the header.
    """

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_begin: int


class Checkpoint:
    """An open safetensors file, whose header is checked and whose tensors are read on demand.

    Args:
        path: the file.

    Raises:
        ParseError: the file cannot be opened, or breaks the format.
    """

    __slots__ = ("_fd", "header", "path")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = -1
        try:
            # Non-blocking, so that the name of a pipe is refused below and not waited for.
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                _fail(self.path, "is not a regular file")
            self.header = _read_header(self.path, self._fd, status.st_size)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
            self.close()
            _fail(self.path, f"cannot be read: {getattr(error, 'strerror', None) or error}")
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of the header."""
        return tuple(self.header.tensors)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The free text that the writer left, by key."""
        return self.header.metadata

    def entry(self, name: str) -> TensorEntry:
        """Look up one tensor.

        Args:
            name: the tensor's name.

        Returns:
            Its dtype, shape and place in the file.

        Raises:
            ShardplanError: the file has no tensor of that name.
        """
        try:
            return self.header.tensors[name]
        except KeyError:
            raise ShardplanError(f"{self.path} has no tensor {name!r}; it has {_listing(self.names)}") from None

    def read(self, name: str) -> Array:
        """Read one whole tensor.

        Args:
            name: the tensor's name.

        Returns:
            A new array of the tensor's shape and dtype, in C order.

        Raises:
            ShardplanError: the file has no tensor of that name.
            ParseError: the file got shorter since it was opened, or a bool is neither 0 nor 1.
        """
        return self.read_box(name, [(0, size) for size in self.entry(name).shape])

    def read_box(self, name: str, box: Box) -> Array:
        """Read a part of one tensor, and from the file only the bytes of that part.

        Args:
            name: the tensor's name.
            box: (start, stop) per dim, with 0 <= start <= stop <= the dim's size.

        Returns:
            A new array of shape stop - start per dim, in C order.

        Raises:
            ShardplanError: the file has no tensor of that name, or the box does not lie in it.
            ParseError: the file got shorter since it was opened, or a bool is neither 0 nor 1.
        """
        entry = self.entry(name)
        runs = box_runs(entry, box, f"{name!r} of {self.path}")
        out = np.empty([stop - start for start, stop in box], _NUMPY[entry.dtype])
        if out.nbytes == 0:
            return out
        target = memoryview(out.reshape(-1).view(np.uint8))
        done = 0
        for begin, nbytes in runs:
            self._fill(target[done : done + nbytes], begin, name)
            done += nbytes
        if entry.dtype == "bool" and (worst := int(out.view(np.uint8).max())) > 1:
            _fail(self.path, f"tensor {name!r} has a bool of value {worst}; legal: 0 and 1")
        return out

    def close(self) -> None:
        """Close the file; reading afterwards is an error, closing again is not."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self.header.tensors)} tensors)"

    def _fill(self, target: memoryview, begin: int, name: str) -> None:
        if self._fd < 0:
            raise ShardplanError(f"cannot read {name!r} of {self.path}: the checkpoint is closed; open it again")
        _pread(self.path, self._fd, target, begin, f"tensor {name!r}")


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a safetensors file and check its header.

    Args:
        path: the file.

    Returns:
        The open checkpoint, which is also a context manager.

    Raises:
        ParseError: the file cannot be opened, or breaks the format.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(f"{folder}/a.safetensors", {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
        ...     with open(f"{folder}/a.safetensors") as file:
        ...         print(file.names, file.entry("w").shape, file.read_box("w", [(0, 2), (1, 2)]).tolist())
        ('w',) (2, 3) [[1.0], [4.0]]
    """
    return Checkpoint(path)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a safetensors file.

    Args:
        path: the file.

    Returns:
        The entries by name, and the metadata.

    Raises:
        ParseError: the file cannot be opened, or breaks the format.
    """
    with Checkpoint(path) as checkpoint:
        return checkpoint.header


def box_runs(entry: TensorEntry, box: Box, what: str = "a tensor") -> Iterator[tuple[int, int]]:
    """List the byte ranges of a file that hold a box, in the box's C order.

    Args:
        entry: the tensor.
        box: (start, stop) per dim, with 0 <= start <= stop <= the dim's size.
        what: how an error names the tensor.

    Returns:
        (position in the file, bytes) of each run: as few, and as long, as the layout on disk allows. None is empty.

    Raises:
        ShardplanError: the box does not lie in the tensor.
    """
    box = [(int(start), int(stop)) for start, stop in box]
    if len(box) != len(entry.shape) or any(
        not 0 <= start <= stop <= size for (start, stop), size in zip(box, entry.shape, strict=True)
    ):
        legal = ", ".join(f"0 <= start <= stop <= {size}" for size in entry.shape) or "no dims"
        raise ShardplanError(f"box {tuple(box)} is not a part of {what}, of shape {entry.shape}; legal: {legal}")
    return _runs(entry, box)


def _runs(entry: TensorEntry, box: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    if any(start == stop for start, stop in box):
        return
    # Dims after `split` are taken whole, so from there inwards the box is contiguous on disk.
    split = len(box) - 1
    while split >= 0 and box[split] == (0, entry.shape[split]):
        split -= 1
    strides = [_NUMPY[entry.dtype].itemsize] * (len(box) + 1)
    for dim in reversed(range(len(box))):
        strides[dim] = strides[dim + 1] * entry.shape[dim]
    if split < 0:
        yield entry.begin, strides[0]
        return
    start, stop = box[split]
    first = entry.begin + sum(low * strides[dim + 1] for dim, (low, _) in enumerate(box))
    extents = [high - low for low, high in box[:split]]
    for index in np.ndindex(*extents):
        yield (
            first + sum(i * strides[dim + 1] for dim, i in enumerate(index)),
            (stop - start) * strides[split + 1],
        )


def write(path: str | os.PathLike[str], arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file so that its name never holds half of one.

    The bytes go to `NAME.partial` beside it, are synced, renamed over `path`, and the directory is synced. Equal arguments
    give equal bytes: tensors lie by falling width of their dtype, then by name, which also aligns each of them.

    Args:
        path: the file to make or replace.
        arrays: array by name; any shape and memory order, a dtype that the format has.
        metadata: free text by key.

    Raises:
        ShardplanError: a name, a dtype or the metadata cannot be written, or the file system refuses.
    """
    path = Path(path)
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header = _encode_header(path, [(name, arrays[name]) for name in names], metadata or {})
    partial = path.with_name(path.name + ".partial")
    try:
        with contextlib.ExitStack() as on_failure:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            on_failure.callback(_discard, partial)
            with os.fdopen(fd, "wb", buffering=0) as file:
                _write_all(file.fileno(), memoryview(header))
                for name in names:
                    _write_all(file.fileno(), _bytes_of(arrays[name]))
                os.fsync(file.fileno())
            os.replace(partial, path)
            on_failure.pop_all()
        _sync_directory(path.parent)
    except OSError as error:
        raise ShardplanError(f"cannot write {path}: {error.strerror or error}") from error


def _encode_header(path: Path, arrays: Sequence[tuple[str, Array]], metadata: Mapping[str, str]) -> bytes:
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
            legal = _listing([str(dtype) for dtype in _FILE_NAME])
            raise ShardplanError(f"cannot write {path}: tensor {name!r} has dtype {array.dtype}; legal: {legal}")
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": file_name, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the data start aligned
    if len(text) > _LARGEST_HEADER:
        raise ShardplanError(f"cannot write {path}: its header has {len(text)} bytes; legal: at most {_LARGEST_HEADER}")
    return struct.pack("<Q", len(text)) + text


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _bytes_of(array: Array) -> memoryview:
    flat = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(-1)
    return memoryview(flat.view(np.uint8)) if flat.size else memoryview(b"")


def _write_all(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fail(path: Path, what: str) -> NoReturn:
    raise ParseError(f"safetensors file {path} {what}") from None


def _listing(names: Sequence[str], limit: int = 20) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + more if names else "none"


def _pread(path: Path, fd: int, target: memoryview, begin: int, what: str) -> None:
    done = 0
    while done < len(target):
        try:
            count = os.preadv(fd, [target[done:]], begin + done)
        except OSError as error:
            _fail(path, f"cannot be read: {error.strerror or error}")
        if count == 0:
            _fail(path, f"ends at byte {begin + done} within {what}, which ends at byte {begin + len(target)}")
        done += count


def _read_header(path: Path, fd: int, size: int) -> Header:
    """Read the header of an open file of `size` bytes and check every invariant of the module."""
    if size < _LENGTH_BYTES:
        _fail(path, f"has {size} bytes; legal: at least {_LENGTH_BYTES}, the length of its header")
    prefix = bytearray(_LENGTH_BYTES)
    _pread(path, fd, memoryview(prefix), 0, "the header's length")
    length: int = struct.unpack("<Q", prefix)[0]
    legal = min(size - _LENGTH_BYTES, _LARGEST_HEADER)
    if length > legal:
        _fail(path, f"says its header has {length} bytes, but has {size} bytes itself; legal: at most {legal}")
    raw = bytearray(length)
    _pread(path, fd, memoryview(raw), _LENGTH_BYTES, "the header")
    fields = _decode_json(path, bytes(raw))
    metadata = _decode_metadata(path, fields.pop(_METADATA, {}))
    data_begin = _LENGTH_BYTES + length
    tensors = {name: _decode_entry(path, name, value, data_begin) for name, value in fields.items()}
    _check_cover(path, tensors, data_begin, size)
    return Header(MappingProxyType(tensors), MappingProxyType(metadata), data_begin)


class _BadJson(ValueError):
    """What the JSON grammar allows and this format does not."""


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
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
        _fail(path, f"has a header that begins with {raw[:8]!r}; legal: a JSON object, from its '{{' on")
    try:
        # A JSON object at the top, as its first byte says.
        return json.loads(raw.decode(), object_pairs_hook=_pairs, parse_constant=_constant)
    except UnicodeDecodeError as error:
        _fail(path, f"has a header that is not UTF-8 at its byte {error.start}")
    except json.JSONDecodeError as error:
        _fail(path, f"has a header that is not JSON at its character {error.pos}: {error.msg}")
    except RecursionError:
        _fail(path, "has a header of JSON nested too deep; legal: 3 levels")
    except ValueError as error:  # _BadJson, and a number of more digits than Python converts
        _fail(path, f"has a bad header: {error}")


def _decode_metadata(path: Path, value: object) -> dict[str, str]:
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        if all(_is_text(text) for text in table.values()):
            return cast("dict[str, str]", table)
    _fail(path, f"has {_METADATA} {_short(value)}; legal: an object of text by text")


def _decode_entry(path: Path, name: str, value: object, data_begin: int) -> TensorEntry:
    """Check one tensor's entry by itself; that it fits the others is `_check_cover`."""
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(value, dict) or set(cast("dict[str, object]", value)) != keys:
        _fail(path, f"describes tensor {name!r} as {_short(value)}; legal: an object of dtype, shape and data_offsets")
    table = cast("dict[str, object]", value)
    known = _DTYPES.get(table["dtype"]) if isinstance(table["dtype"], str) else None
    if known is None:
        _fail(path, f"gives tensor {name!r} dtype {_short(table['dtype'])}; legal: {', '.join(_DTYPES)}")
    shape = _naturals(table["shape"])
    if shape is None or len(shape) > _LARGEST_NDIM:
        legal = f"at most {_LARGEST_NDIM} whole numbers, 0 or more"
        _fail(path, f"gives tensor {name!r} shape {_short(table['shape'])}; legal: {legal}")
    dtype, numpy_dtype = known
    if math.prod(n or 1 for n in shape) * numpy_dtype.itemsize > _LARGEST_BYTES:
        _fail(path, f"gives tensor {name!r} shape {_short(list(shape))}; legal: at most {_LARGEST_BYTES} bytes")
    offsets = _naturals(table["data_offsets"])
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        legal = "[begin, end] with 0 <= begin <= end"
        _fail(path, f"gives tensor {name!r} data_offsets {_short(table['data_offsets'])}; legal: {legal}")
    begin, end = offsets
    nbytes = math.prod(shape) * numpy_dtype.itemsize
    if end - begin != nbytes:
        asked = f"{dtype} of shape {list(shape)}"
        _fail(path, f"gives tensor {name!r} {end - begin} bytes, [{begin}, {end}]; legal: {nbytes}, being {asked}")
    return TensorEntry(dtype, shape, data_begin + begin, data_begin + end)


def _naturals(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    items = cast("list[object]", value)
    numbers = tuple(item for item in items if type(item) is int and item >= 0)  # a bool is an int, a float is not
    return numbers if len(numbers) == len(items) else None


def _check_cover(path: Path, tensors: Mapping[str, TensorEntry], data_begin: int, size: int) -> None:
    at, before = data_begin, "the header"
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        begin, end = entry.begin - data_begin, entry.end - data_begin
        if entry.begin != at:
            wrong = "overlaps" if entry.begin < at else "leaves a gap after"
            _fail(
                path, f"has tensor {name!r} at [{begin}, {end}], which {wrong} {before}; legal: from {at - data_begin}"
            )
        if entry.end > size:
            legal = f"up to {size - data_begin}, where the file ends (is it truncated?)"
            _fail(path, f"has tensor {name!r} at [{begin}, {end}], beyond its end; legal: {legal}")
        at, before = entry.end, f"tensor {name!r}"
    if at != size:
        _fail(path, f"has {size - at} bytes after {before} that belong to no tensor; legal: none")


def _short(value: object, limit: int = 80) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
