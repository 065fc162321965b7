"""Folders of torch.distributed.checkpoint: tensors of whole names, in chunks, each a file of torch.save within a file.

Chunks are read by byte ranges too: torch.save stores a tensor's bytes uncompressed within its archive. What is written
is read by torch's own reader.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.errors import ParseError, line, optional, shown

_LOCAL_HEADER = 30  # bytes of a zip archive's local header, without the name and what is extra
_MOST_PICKLE = 2**20  # bytes of what torch.save says of one tensor


@dataclass(frozen=True, slots=True)
class DistributedChunk:
    """A box of a tensor: where it begins, its sizes, and where its bytes begin in which file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    begin: int


class DistributedTensor:
    """A tensor of a folder, whose chunks cover it once."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype_name: str, chunks: list[DistributedChunk]) -> None:
        """Check the chunks; raises `ParseError` where they overlap or leave something out."""
        self._name, self._shape, self._dtype = name, shape, dtype_name
        self.chunks = sorted(chunks, key=lambda c: c.offsets)
        total = sum(int(np.prod(c.sizes, dtype=np.int64)) for c in chunks)
        if total != int(np.prod(shape, dtype=np.int64)) or _overlap(self.chunks):
            raise ParseError(
                f"tensor {name!r} of shape {shape} has chunks of {total} elements that do not cover it once; legal are "
                "chunks that do"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        return numpy_dtype(self._dtype)

    @property
    def dtype_name(self) -> str:
        """The short name of its dtype."""
        return self._dtype

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill bytes from the element `start` on; raises `ParseError` where a file is too short."""
        width = self.dtype.itemsize
        out = np.frombuffer(target, dtype=np.uint8)
        stop = start + len(target) // width
        for chunk in self.chunks:
            for at, own, count in _shared(self.shape, chunk, start, stop):
                _pread(chunk.path, out[(at - start) * width : (at - start + count) * width], chunk.begin + own * width)


def _overlap(chunks: list[DistributedChunk]) -> bool:
    for k, a in enumerate(chunks):
        for b in chunks[k + 1 :]:
            if a.offsets and b.offsets[0] >= a.offsets[0] + a.sizes[0]:
                break
            meets = (
                max(p, q) < min(p + m, q + n) for p, m, q, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
            )
            if all(meets):
                return True
    return False


def _shared(shape: tuple[int, ...], chunk: DistributedChunk, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return what a chunk has of the flat interval: flat start, start within the chunk, elements."""
    split = len(shape)  # dims from here on are whole in the chunk, so that it is contiguous from one before
    while split and chunk.sizes[split - 1] == shape[split - 1]:
        split -= 1
    split = max(split - 1, 0)
    tail = int(np.prod(shape[split + 1 :], dtype=np.int64)) if shape else 1
    run = (chunk.sizes[split] if shape else 1) * tail
    strides = [int(np.prod(shape[d + 1 :], dtype=np.int64)) for d in range(len(shape))]
    head = sum(o * s for o, s in zip(chunk.offsets, strides, strict=True))
    last = head + sum((n - 1) * s for n, s in zip(chunk.sizes, strides, strict=True)) + 1
    if not run or stop <= head or start >= last:
        return []
    out: list[tuple[int, int, int]] = []
    for k, at in enumerate(np.ndindex(*chunk.sizes[:split])):
        flat = head + sum(i * s for i, s in zip(at, strides, strict=False))
        low, high = max(flat, start), min(flat + run, stop)
        if low < high:
            out.append((low, k * run + low - flat, high - low))
    return out


def _pread(path: Path, target: np.ndarray, begin: int) -> None:
    view: Any = memoryview(target)  # pyright: ignore
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while len(view) > 0:
            count = os.preadv(fd, [view], begin)
            if not count:
                raise ParseError(
                    f"{line(path)} ends at byte {begin}; legal is the file that {path.parent.name} describes"
                )
            view, begin = view[count:], begin + count
    finally:
        os.close(fd)


def opened_distributed(path: Path, ignored: Sequence[str] = ()) -> tuple[dict[str, DistributedTensor], list[Path]]:
    """Return the tensors of a folder by name, and its files; what is no tensor, or matches `ignored`, is left out.

    Raises `ParseError` for metadata that are none, and `MissingExtra` without torch.
    """
    checkpoint = optional("torch.distributed.checkpoint", "torch")
    metadata_of = optional("torch.distributed.checkpoint.metadata", "torch")
    from shardplan.execution.torch.dtypes import short_name_of

    try:
        metadata = checkpoint.FileSystemReader(path).read_metadata()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError) as error:
        raise ParseError(f"{line(path / '.metadata')}: {shown(error)}; legal is what torch wrote") from None
    lies = {(i.fqn, tuple(i.offset or ()), i.index): info for i, info in metadata.storage_data.items()}
    by_place = {(fqn, offset): info for (fqn, offset, _), info in lies.items()}
    out: dict[str, DistributedTensor] = {}
    files: dict[Path, None] = {}
    for name, found in metadata.state_dict_metadata.items():
        if (
            not isinstance(found, metadata_of.TensorStorageMetadata)
            or name in ignored
            or any(fnmatchcase(name, p) for p in ignored)
        ):
            continue
        chunks: list[DistributedChunk] = []
        for chunk in found.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            info = by_place.get((name, offsets)) or by_place.get((name, ()))
            if info is None:
                raise ParseError(f"{line(path)}: tensor {name!r} has no bytes for its chunk at {list(offsets)}")
            file = path / info.relative_path
            files[file] = None
            nbytes = int(np.prod(sizes, dtype=np.int64)) * found.properties.dtype.itemsize
            begin = _data_begin(file, info.offset, info.length, sizes, nbytes, name)
            chunks.append(DistributedChunk(offsets, sizes, file, begin))
        out[name] = DistributedTensor(name, tuple(found.size), short_name_of(found.properties.dtype), chunks)
    return out, sorted(files)


class _Part(io.RawIOBase):
    """A part of a file, read as a file of its own."""

    def __init__(self, path: Path, begin: int, length: int) -> None:
        self.file, self.begin, self.length, self.at = path.open("rb"), begin, length, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = max(min(len(view), self.length - self.at), 0)
        self.file.seek(self.begin + self.at)
        found = self.file.readinto(view[:count])
        self.at += found
        return found

    def close(self) -> None:
        self.file.close()
        super().close()


def _data_begin(path: Path, offset: int, length: int, sizes: tuple[int, ...], nbytes: int, name: str) -> int:
    """Return where the bytes of a tensor begin that torch.save wrote at an offset of a file."""
    where = f"{line(path)}: the chunk of {name!r} at byte {offset}"
    try:
        with _Part(path, offset, length) as part, zipfile.ZipFile(part) as archive:
            data = [i for i in archive.infolist() if "/data/" in i.filename]
            if len(data) != 1 or data[0].compress_type != zipfile.ZIP_STORED or data[0].file_size != nbytes:
                raise ParseError(f"{where} is not {nbytes} plain bytes; legal is a tensor as torch.save writes it")
            _contiguous(archive, sizes, where)
            part.seek(data[0].header_offset)
            head = part.read(_LOCAL_HEADER) or b""
            extra = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            return offset + data[0].header_offset + _LOCAL_HEADER + extra
    except (OSError, zipfile.BadZipFile) as error:
        raise ParseError(f"{where}: {shown(error)}; legal is a tensor as torch.save writes it") from None


class _Said(pickle.Unpickler):
    """Reads what torch.save says of one tensor: nothing is built, the arguments are kept."""

    def find_class(self, module: str, name: str) -> Any:
        return lambda *arguments: (name, arguments)

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _contiguous(archive: zipfile.ZipFile, sizes: tuple[int, ...], where: str) -> None:
    """Raise `ParseError` unless the tensor of an archive lies in C order from the first byte on."""
    entry = next(i for i in archive.infolist() if i.filename.endswith("data.pkl"))
    if entry.file_size > _MOST_PICKLE:
        raise ParseError(f"{where} says {entry.file_size} bytes of its tensor; legal is one tensor")
    said = _Said(io.BytesIO(archive.read(entry))).load()
    while isinstance(said, tuple) and said and said[0] != "_rebuild_tensor_v2":
        said = next((x for x in said[1] if isinstance(x, tuple) and x and isinstance(x[0], str)), None)
    if not isinstance(said, tuple):
        raise ParseError(f"{where} is no plain tensor; legal is a tensor as torch.save writes it")
    _, start, shape, strides = said[1][:4]
    wanted = [int(np.prod(shape[d + 1 :], dtype=np.int64)) for d in range(len(shape))]
    straight = all(n <= 1 or a == b for n, a, b in zip(shape, strides, wanted, strict=True))
    if start != 0 or tuple(shape) != tuple(sizes) or not straight:
        raise ParseError(f"{where} has strides {tuple(strides)}; legal is a contiguous tensor")


def blob(array: np.ndarray) -> bytes:
    """Return an array as torch.save writes it."""
    torch = optional("torch", "torch")
    from shardplan.execution.torch.dtypes import to_torch

    out = io.BytesIO()
    torch.save(to_torch(array), out)
    return out.getvalue()


def metadata_bytes(
    tensors: list[tuple[str, tuple[int, ...], str]], lies: list[tuple[str, list[int], list[int], str, int, int]]
) -> bytes:
    """Return the metadata of a folder.

    Args:
        tensors: name, shape and dtype of every tensor.
        lies: of every chunk: name, where it begins, its sizes, file, offset, bytes.
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
    metadata = m.Metadata(state, planner_data={name: (name,) for name in state}, storage_data=storage)
    return pickle.dumps(metadata)
