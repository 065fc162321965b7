"""What of a destination is finished: files with sizes and checksums, under the hash of what was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shardplan.core.decoding import decode_json, read_bytes
from shardplan.errors import LayoutError, ParseError, ShardplanError, excerpt, line
from shardplan.interop.checkpoint.output import checksum_of
from shardplan.interop.checkpoint.sharing import ProcessShare, assign_by_size, notes_of
from shardplan.plans.plan_file import write_atomic

MANIFEST = "shardplan.json"
ALONE = ProcessShare()
Beat = Callable[[], None] | None
FORMAT = 1


class FormatFields(msgspec.Struct):
    """What a file of a reshard begins with."""

    format: Any


Fields = TypeVar("Fields", bound=FormatFields)


def read_format(path: Path, fields: type[Fields]) -> Fields:
    """Return what a file of a reshard says; raises `ParseError` for one that is malformed, or of another format."""
    try:
        data = decode_json(read_bytes(path), fields)
    except ParseError as error:
        raise ParseError(f"{line(path)}: {line(error)}; legal is what reshard wrote") from None
    if data.format != FORMAT:
        raise ParseError(f"{line(path)}: format {excerpt(data.format)}; this version reads format {FORMAT}")
    return data


class _ManifestFields(FormatFields):
    """The file."""

    request: str
    form: str
    weights: str
    complete: bool
    files: dict[str, dict[str, Any]]


@dataclass(slots=True)
class CheckpointManifest:
    """The manifest of a folder; `weights` is the text of how it is stored, `files` what is finished."""

    folder: Path
    request: str
    form: str
    weights: str
    complete: bool = False
    files: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @staticmethod
    def of(folder: Path) -> CheckpointManifest | None:
        """Return the manifest of a folder, None where there is none; raises `ParseError` where it is malformed."""
        path = folder / MANIFEST
        if not path.is_file():
            return None
        data = read_format(path, _ManifestFields)
        for name, said in data.files.items():
            count = said.get("bytes")
            if type(count) is not int or count < 0 or not isinstance(said.get("sha256"), str) or "\0" in name:
                raise ParseError(
                    f"{line(path)}: the file {excerpt(name)} is {excerpt(said)}; legal is what reshard wrote"
                )
        return CheckpointManifest(folder, data.request, data.form, data.weights, data.complete, data.files)

    def save(self) -> None:
        """Write it, atomically; raises `ShardplanError` where that cannot be."""
        data = {"format": FORMAT, "request": self.request, "form": self.form, "complete": self.complete}
        data |= {"weights": self.weights, "files": self.files}
        try:
            write_atomic(self.folder / MANIFEST, (json.dumps(data, indent=1) + "\n").encode())
        except OSError as error:
            raise ShardplanError(f"cannot write {line(self.folder / MANIFEST)}: {error.strerror or error}") from None

    def stands(self, name: str) -> bool:
        """Whether a file is recorded, and there in its size."""
        said = self.files.get(name)
        try:
            return said is not None and (self.folder / name).stat().st_size == said["bytes"]
        except OSError:
            return False

    def is_file_finished(self, name: str, beat: Beat = None) -> bool:
        """Whether a file is finished: it is read again, and its checksum compared; see `checksum_of`."""
        said = self.files.get(name)
        if said is None or not self.stands(name):
            return False
        return checksum_of(self.folder / name, beat) == (said["bytes"], said["sha256"])

    def verify(self, share: ProcessShare = ALONE, beat: Beat = None) -> None:
        """Read a process's share of the files again; raises `ParseError` where one is not what was recorded."""
        owners = assign_by_size([said["bytes"] for said in self.files.values()], share.count)
        for (name, said), owner in zip(self.files.items(), owners, strict=True):
            if owner != share.number:
                continue
            found = checksum_of(self.folder / name, beat)
            if found != (said["bytes"], said["sha256"]):
                raise ParseError(
                    f"{line(self.folder / name)} has {found[0]} bytes of checksum {found[1][:16]}, and {said['bytes']} "
                    f"of {said['sha256'][:16]} are recorded; legal is the file that was written"
                )


def resume_manifest(folder: Path, request: str, form: str, weights: str) -> CheckpointManifest:
    """Return the manifest to go on with: what a killed run of the same request finished, or a new one.

    Raises `LayoutError` where the folder holds anything else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # before what others say: a process says that it came before it writes
        present = sorted(p.name for p in folder.iterdir() if not p.name.endswith(".partial"))
    except OSError as error:
        raise ShardplanError(f"cannot write {line(folder)}: {error.strerror or error}") from None
    notes = notes_of(folder)
    found = CheckpointManifest.of(folder)  # after the notes, which are gone once it is there
    if found is None and not notes and present:
        raise LayoutError(
            f"the destination {line(folder)} holds {excerpt(present[0])}; legal is a new folder, or one that a "
            "killed run of the same request left"
        )
    for other in [n.request for n in notes.values()] + ([] if found is None else [found.request]):
        if other != request:
            raise LayoutError(
                f"the destination {line(folder)} is of another request ({other[:16]}, and this is {request[:16]}); "
                "legal is the same source, tables and form, or another folder"
            )
    manifest = found or CheckpointManifest(folder, request, form, weights)
    for note in notes.values():
        manifest.files = note.files | manifest.files
    return manifest


def has_unfinished_run(folder: Path) -> bool:
    """Whether a folder is the destination of a run that has not ended."""
    found = CheckpointManifest.of(folder)
    return bool(notes_of(folder)) if found is None else not found.complete
