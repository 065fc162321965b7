"""`.metadata` of a folder of torch.distributed.checkpoint: read as data, without torch, and written as torch writes it.

It is a pickle. Read, it is what `pickle_reader` says of it: the classes that torch has put there are known by module
and name, and none is imported.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardplan.errors import ParseError, excerpt, line, optional
from shardplan.interop.checkpoint.pickle_reader import PickledCall, PickledName, PickledRows, read_pickle

METADATA = ".metadata"
MOST_BYTES = 2**30  # some six million chunks
_MOST = 2**62  # a size, or a place in a file
_OF = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # where torch 2.2 and before have two of them
_SIZE, _GET_LAYOUT = ("torch", "Size"), ("torch.serialization", "_get_layout")
_STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_PROPERTIES = ((_OF, "TensorProperties"), (_OLD, "TensorProperties"))
_CLASSES = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "complex32", "complex64", "complex128",
)  # fmt: skip
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")  # of a checkpoint's own folder
ADMITTED = frozenset(
    [
        *((_OF, name) for name in (*_CLASSES, "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *_PROPERTIES, (_OLD, "MEM_FORMAT_ENCODING"), _STORAGE_INFO, _SIZE, _GET_LAYOUT, ("collections", "OrderedDict"),
        *(("torch", name) for name in _DTYPES),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a folder: torch's name of its dtype, its shape, and where each chunk begins, and its sizes."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class SavedPlace:
    """Where the bytes of a chunk are: a file of the folder, the first byte, how many, and what was done to them."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]


Saved = tuple[dict[str, SavedTensor], dict[tuple[str, tuple[int, ...]], SavedPlace]]
"""Tensors by name, and the places of chunks by name and by where they begin."""


def saved_tensors(folder: Path) -> Saved:
    """Return what a folder's metadata say; what is no tensor is left out.

    Raises `ParseError` where they are not what torch writes.
    """
    path = folder / METADATA
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ParseError(f"it has {size} bytes; legal are {MOST_BYTES}")
        said = read_pickle(path.read_bytes(), ADMITTED)
    except (OSError, ParseError) as error:
        raise ParseError(f"{line(path)}: {line(error)}") from None
    try:
        return _parse_metadata(said)
    except ParseError as error:
        raise ParseError(f"{line(path)} has {line(error)}; legal is what torch writes there") from None


def _parse_metadata(said: Any) -> Saved:
    top = _fields(said, (_OF, "Metadata"))
    tensors: dict[str, SavedTensor] = {}
    for name, found in _rows(top.get("state_dict_metadata")):
        if isinstance(found, PickledCall) and (found.of.module, found.of.name) == (_OF, "BytesStorageMetadata"):
            continue
        own = _fields(found, (_OF, "TensorStorageMetadata"))
        properties = _call(own.get("properties"), *_PROPERTIES).state
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, PickledName) or dtype.module != "torch" or dtype.name not in _DTYPES:
            raise ParseError(f"no dtype for the tensor {excerpt(name)}")
        if not isinstance(chunks := own.get("chunks"), list):
            raise ParseError(f"no list of chunks for the tensor {excerpt(name)}")
        boxes = [_fields(c, (_OF, "ChunkStorageMetadata")) for c in chunks]
        every = tuple((_sizes(b.get("offsets")), _sizes(b.get("sizes"))) for b in boxes)
        tensors[name] = SavedTensor(dtype.name, _sizes(own.get("size")), every)
    places: dict[tuple[str, tuple[int, ...]], SavedPlace] = {}
    for key, value in _rows(top.get("storage_data"), texts=False):
        index, info = _fields(key, (_OF, "MetadataIndex")), _fields(value, _STORAGE_INFO)
        file, offset, transforms = info.get("relative_path"), index.get("offset"), info.get("transform_descriptors")
        fqn = index.get("fqn")
        if not isinstance(file, str) or not isinstance(fqn, str):
            raise ParseError(f"no file for {excerpt(fqn) if isinstance(fqn, str) else 'a tensor without a name'}")
        done = tuple(t for t in transforms if isinstance(t, str)) if isinstance(transforms, list | tuple) else ()
        place = SavedPlace(file, _parse_size(info.get("offset")), _parse_size(info.get("length")), done)
        places[fqn, () if offset is None else _sizes(offset)] = place
    return tensors, places


def _call(value: Any, *names: tuple[str, str]) -> PickledCall:
    """Return an instance of one of some classes."""
    if not isinstance(value, PickledCall) or (value.of.module, value.of.name) not in names:
        found = f"{value.of.module}.{value.of.name}" if isinstance(value, PickledCall) else type(value).__name__
        raise ParseError(f"a {found} where a {names[0][1]} must be")
    return value


def _fields(value: Any, name: tuple[str, str]) -> dict[str, Any]:
    """Return the fields of an instance of a class."""
    state = _call(value, name).state
    return dict(_rows(state))


def _rows(value: Any, texts: bool = True) -> Iterator[tuple[Any, Any]]:
    """Yield the rows of a dict, whose keys are texts."""
    if not isinstance(value, PickledRows):
        raise ParseError(f"a {type(value).__name__} where a dict must be")
    for key, found in value.rows:
        if texts and not isinstance(key, str):
            raise ParseError(f"a key that is a {type(key).__name__}, and no text")
        yield key, found


def _parse_size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ParseError(f"a size or a place of {excerpt(value) if type(value) is int else type(value).__name__}")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    if isinstance(value, PickledCall) and (value.of.module, value.of.name) == _SIZE and len(value.arguments) == 1:
        (value,) = value.arguments
    if not isinstance(value, tuple | list):
        raise ParseError(f"a {type(value).__name__} where a torch.Size must be")
    return tuple(map(_parse_size, value))


def metadata_bytes(
    tensors: list[tuple[str, tuple[int, ...], str]],
    lies: list[tuple[str, list[int], list[int], str, int, int]],
    objects: list[tuple[str, str, int, int]] | None = None,
) -> bytes:
    """Return the metadata of a folder.

    Args:
        tensors: name, shape and dtype of every tensor.
        lies: of every chunk: name, where it begins, its sizes, file, offset, bytes.
        objects: what is no tensor: name, file, offset, bytes.
    """
    torch = optional("torch", "torch")
    m = optional("torch.distributed.checkpoint.metadata", "torch")
    filesystem = optional("torch.distributed.checkpoint.filesystem", "torch")
    from shardplan.execution.torch.dtypes import torch_dtype

    by_name: dict[str, list[tuple[str, list[int], list[int], str, int, int]]] = {}
    for row in lies:
        by_name.setdefault(row[0], []).append(row)
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    files = {row[3]: row[3] for row in reversed(lies)}  # one value each: pickle writes a second one anew
    for name, shape, dtype in tensors:
        chunks: list[Any] = []
        for k, (_, begin, sizes, file, offset, length) in enumerate(by_name[name]):
            chunks.append(m.ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes)))
            storage[m.MetadataIndex(name, torch.Size(begin), k)] = filesystem._StorageInfo(files[file], offset, length)
        properties = m.TensorProperties(dtype=torch_dtype(dtype))
        state[name] = m.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    for name, file, offset, length in objects or ():
        state[name] = m.BytesStorageMetadata()
        storage[m.MetadataIndex(name)] = filesystem._StorageInfo(files.setdefault(file, file), offset, length)
    metadata = m.Metadata(state, planner_data={name: (name,) for name in state}, storage_data=storage)
    return pickle.dumps(metadata)
