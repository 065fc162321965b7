"""What of a destination is finished: files with sizes and checksums, under the hash of what was asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardplan.errors import LayoutError, ParseError, ShardplanError, line, shown
from shardplan.interop.checkpoint.output import checksum_of
from shardplan.plans.plan_file import write_atomic

MANIFEST = "shardplan.json"
_FORMAT = 1


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
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise ParseError(f"{line(path)}: format {shown(data['format'])}; this version reads format {_FORMAT}")
            files = {
                str(k): {"bytes": int(v["bytes"]), "sha256": str(v["sha256"]), **v} for k, v in data["files"].items()
            }
            texts = str(data["request"]), str(data["form"]), str(data["weights"])
            return CheckpointManifest(folder, *texts, bool(data["complete"]), files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ParseError(f"{line(path)}: {shown(error)}; legal is what reshard wrote") from None

    def save(self) -> None:
        """Write it, atomically; raises `ShardplanError` where that cannot be."""
        data = {"format": _FORMAT, "request": self.request, "form": self.form, "complete": self.complete}
        data |= {"weights": self.weights, "files": self.files}
        try:
            write_atomic(self.folder / MANIFEST, (json.dumps(data, indent=1) + "\n").encode())
        except OSError as error:
            raise ShardplanError(f"cannot write {line(self.folder / MANIFEST)}: {error.strerror or error}") from None

    def finished(self, name: str) -> bool:
        """Whether a file is finished: it is read again, and its checksum compared."""
        said, path = self.files.get(name), self.folder / name
        if said is None or not path.is_file() or path.stat().st_size != said["bytes"]:
            return False
        return checksum_of(path) == (said["bytes"], said["sha256"])

    def verify(self) -> None:
        """Read every file again, and raise `ParseError` where one is not what was recorded."""
        for name, said in self.files.items():
            found = checksum_of(self.folder / name)
            if found != (said["bytes"], said["sha256"]):
                raise ParseError(
                    f"{line(self.folder / name)} has {found[0]} bytes of checksum {found[1][:16]}, and {said['bytes']} "
                    f"of {said['sha256'][:16]} are recorded; legal is the file that was written"
                )


def resumed(folder: Path, request: str, form: str, weights: str) -> CheckpointManifest:
    """Return the manifest to go on with: that of a killed run of the same request, or a new one.

    Raises `LayoutError` where the folder holds anything else.
    """
    found = CheckpointManifest.of(folder)
    if found is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            present = sorted(p.name for p in folder.iterdir() if not p.name.endswith(".partial"))
        except OSError as error:
            raise ShardplanError(f"cannot write {line(folder)}: {error.strerror or error}") from None
        if present:
            raise LayoutError(
                f"the destination {line(folder)} holds {shown(present[0])}; legal is a new folder, or one that a "
                "killed run of the same request left"
            )
        return CheckpointManifest(folder, request, form, weights)
    if found.request != request:
        raise LayoutError(
            f"the destination {line(folder)} is of another request ({found.request[:16]}, and this is {request[:16]}); "
            "legal is the same source, tables and form, or another folder"
        )
    return found
