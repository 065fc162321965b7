"""Small objects that torch.save wrote, read as data: a file of its own, or a part of a file of a checkpoint's folder.

Nothing is imported or called (`pickle_reader`): what a pickle would make of classes stays what it says, and is left to
the caller. A tensor of one element is its number.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.errors import ParseError, excerpt, line
from shardplan.interop.checkpoint.distributed import ARCHIVE_ERRORS, REBUILD, open_part
from shardplan.interop.checkpoint.pickle_reader import PickledCall, PickledName, PickledRows, read_pickle

_MOST = 2**26  # bytes of a pickle: settings of a run
_NUMBERS = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "LongStorage": "<i8", "IntStorage": "<i4",
}  # fmt: skip


class SavedObject:
    """What torch.save wrote at one place: its value as data, and the numbers of tensors beside it."""

    def __init__(self, path: Path, begin: int = 0, length: int | None = None) -> None:
        """Read it. Raises `ParseError` where it is not what torch.save writes."""
        self.where = f"{line(path)} at byte {begin}" if begin else line(path)
        self._numbers: dict[str, bytes] = {}
        try:
            size = path.stat().st_size - begin if length is None else length
            with open_part(path, begin, size) as part, zipfile.ZipFile(part) as archive:
                entries = {i.filename.partition("/")[2]: i for i in archive.infolist()}
                said = entries.get("data.pkl")
                if said is None or said.file_size > _MOST:
                    raise ParseError(f"{self.where} has no pickle of at most {_MOST} bytes; legal is one of torch.save")
                self.value = read_pickle(archive.read(said), None, persistent=True)
                for name, entry in entries.items():
                    if name.startswith("data/") and entry.file_size <= 8:
                        self._numbers[name.removeprefix("data/")] = archive.read(entry)
        except ParseError as error:
            raise ParseError(f"{self.where}: {line(error)}") from None
        except ARCHIVE_ERRORS as error:
            raise ParseError(f"{self.where}: {excerpt(error)}; legal is what torch.save writes") from None

    def rows(self, value: Any) -> dict[Any, Any]:
        """Return a dict, or the fields of an instance, by its keys that are texts or whole numbers; else nothing."""
        if isinstance(value, PickledCall):
            value = value.state if isinstance(value.state, PickledRows) else PickledRows(value.rows)
        rows = value.rows if isinstance(value, PickledRows) else []
        return {k: v for k, v in rows if isinstance(k, str) or type(k) is int}

    def plain_value(self, value: Any) -> Any:
        """Return a number, truth, text, None, or a flat list or tuple of such; raises `ParseError` for what is none.

        A tensor of one element is its number.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple) and all(x is None or isinstance(x, bool | int | float | str) for x in value):
            return value
        if isinstance(value, PickledCall) and (value.of.module, value.of.name) in REBUILD:
            storage: Any = value.arguments[0] if value.arguments else ()
            told = storage if isinstance(storage, tuple) and len(storage) > 2 else (None, None, None)
            kind = told[1].name if isinstance(told[1], PickledName) else ""
            raw = self._numbers.get(str(told[2]), b"")
            if kind in _NUMBERS and len(raw) == np.dtype(_NUMBERS[kind]).itemsize:
                return np.frombuffer(raw, _NUMBERS[kind])[0].item()
        named = isinstance(value, PickledCall | PickledName)
        what = (value.of if isinstance(value, PickledCall) else value).name if named else type(value).__name__
        raise ParseError(f"{self.where} has a {what}; legal are numbers, texts, and lists of them")
