"""Where in its source an instruction of a compiled module comes from, by the module's metadata.

Source: the text that XLA prints (checked with jaxlib 0.10.2): `metadata={op_name="jit(f)/add" stack_frame_id=2}` with
tables of files, functions, locations and frames in front, or, as older ones have it, `source_file=` and `source_line=`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"source_line=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"^(\d+) (.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")


class SourcePlaces(NamedTuple):
    """By the number of a stack frame where it is: `file:line (function)`."""

    frames: Mapping[int, str]

    @staticmethod
    def parse(text: str) -> SourcePlaces:
        """Read the tables in front of a module; of one without them there are none."""
        rows: dict[str, dict[int, str]] = {title: {} for title in _TABLES}
        title = ""
        for line in text.splitlines():
            if line in rows:
                title = line
            elif line.startswith(("%", "ENTRY")):
                break
            elif title and (row := _ROW.match(line)):
                rows[title][int(row[1])] = row[2]
        names, functions, locations, frames = (rows[title] for title in _TABLES)
        found: dict[int, str] = {}
        for number, said in frames.items():
            at = dict(_FIELD.findall(locations.get(int(dict(_FIELD.findall(said)).get("file_location_id", 0)), "")))
            file = names.get(int(at.get("file_name_id", 0)), "").strip('"')
            function = functions.get(int(at.get("function_name_id", 0)), "").strip('"')
            if file:
                found[number] = f"{file}:{at.get('line', 0)}" + (f" ({function})" if function else "")
        return SourcePlaces(found)

    def place(self, attributes: str) -> tuple[str, str]:
        """Return the operation that an instruction is of, and where that is; empty texts where it does not say."""
        name, frame = _NAME.search(attributes), _FRAME.search(attributes)
        file, line = _FILE.search(attributes), _LINE.search(attributes)
        where = self.frames.get(int(frame[1]), "") if frame else ""
        if not where and file:
            where = file[1] + (f":{line[1]}" if line else "")
        return (name[1] if name else ""), where
