"""Shared objects that this user built: where they are kept, and which are loaded.

What is loaded runs, so nothing is loaded that somebody else could have written. The folder is a real one of this user
with mode 0700, every folder above it is one in which nobody else can put another in its place (of this user or root,
and writable by nobody else unless it is sticky, as a shared temporary folder is), and the file is a real one of this
user that nobody else may write. A file appears whole or not at all: it is built aside, written to disk, and renamed.
"""

from __future__ import annotations

import ctypes
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from shardplan.errors import line

UNMAPPED = 65534  # whom files belong to whose owner a user namespace does not know: the root outside of it


def folders(name: str) -> Iterator[Path]:
    """Yield where built files may be kept: in the user's cache, by the XDG rule, then in the temporary folder."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(told) if os.path.isabs(told) else Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        pass
    else:
        yield cache / "shardplan" / name
    yield Path(tempfile.gettempdir()) / f"shardplan-{os.geteuid()}-{name}"


def private_folder(path: Path) -> Path:
    """Return a folder, made where there is none, without links; raises `OSError` where somebody else may write there.

    The line says what is wrong with which folder, and what is legal.
    """
    for each in reversed([each for each in (path, *path.parents) if not os.path.lexists(each)]):
        each.mkdir(mode=0o700, exist_ok=True)
    found, mine = path.lstat(), os.geteuid()
    if not stat.S_ISDIR(found.st_mode):
        raise _folder_error(path, "is a link or no folder", found)
    if found.st_uid != mine or found.st_mode & 0o077:
        raise _folder_error(path, "is open to others", found)
    path = path.parent.resolve() / path.name
    for above in path.parents:
        found = above.stat()
        shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if shared or found.st_uid not in (0, mine, UNMAPPED):
            raise _folder_error(above, f"lies above {line(path)} and is open to others", found)
    return path


def _folder_error(path: Path, wrong: str, found: os.stat_result) -> OSError:
    kept = f"(owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o})"
    legal = f"legal is a folder of user {os.geteuid()} with mode 0700"
    return OSError(f"{line(path)} {wrong} {kept}; {legal}")


def build(path: Path, make: Callable[[Path], object]) -> Path:
    """Return the path of a built file in its `private_folder`; where it is not there, `make` writes it, given a path.

    Raises `OSError`, and what `make` raises.
    """
    path = private_folder(path.parent) / path.name
    if not os.path.lexists(path):
        with tempfile.TemporaryDirectory(dir=path.parent) as drafts:
            builder = Path(drafts) / path.name
            make(builder)
            builder.chmod(0o700)  # whatever the umask
            with builder.open("rb") as written:
                os.fsync(written.fileno())
            builder.replace(path)
    return path


def load(path: Path) -> ctypes.CDLL:
    """Return a shared object, loaded; raises `OSError` where somebody else could have written it."""
    path = private_folder(path.parent) / path.name
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        kept = f"(owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o})"
        legal = f"legal is a file of user {os.geteuid()} that nobody else may write"
        raise OSError(f"{line(path)} is a link, or open to others {kept}; {legal}")
    return ctypes.CDLL(str(path))
