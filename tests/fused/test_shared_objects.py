"""Compiled kernels are loaded from where nobody else could have put them, and otherwise done without, said once."""

import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardplan.fused.kernels import native as natives
from shardplan.fused.kernels import shared_objects

COMPILER = natives.compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, Path]:
    """A shared object with the name of the kernels in a private folder, and the file that it makes once loaded."""
    folder, mark, source = tmp_path / "kernels", tmp_path / "loaded", tmp_path / "planted.cpp"
    folder.mkdir(mode=0o700)
    source.write_text(f'#include <cstdio>\n__attribute__((constructor)) static void f() {{ fopen("{mark}", "w"); }}\n')
    assert COMPILER is not None
    path = folder / natives.file_name(COMPILER)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", path, source], check=True)
    path.chmod(0o700)
    return path, mark


@pytest.fixture
def fresh() -> Iterator[None]:
    natives.native.cache_clear()
    yield
    natives.native.cache_clear()


def owned_by_another(path: Path, patch: pytest.MonkeyPatch) -> None:
    """As root it is given away; else this process thinks that it is somebody else."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        mine = os.geteuid()
        patch.setattr(os, "geteuid", lambda: mine + 1)


def a_link_to_it(path: Path, patch: pytest.MonkeyPatch) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


WAYS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "folder is a link": (lambda path, patch: a_link_to_it(path.parent, patch), "is a link or no folder"),
    "folder of another": (lambda path, patch: owned_by_another(path.parent, patch), "is open to others (owner"),
    "folder of a group": (lambda path, _: path.parent.chmod(0o770), "mode 0770); legal is a folder of user"),
    "folder to be read": (lambda path, _: path.parent.chmod(0o755), "mode 0755); legal is a folder of user"),
    "folder above it": (lambda path, _: path.parent.parent.chmod(0o777), "kernels and is open to others (owner"),
    "file of a group": (lambda path, _: path.chmod(0o770), "mode 0770); legal is a file of user"),
    "file of all": (lambda path, _: path.chmod(0o702), "mode 0702); legal is a file of user"),
    "file is a link": (a_link_to_it, "is a link, or open to others"),
    "file of another": (owned_by_another, "(owner"),
}


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
def test_what_others_may_write_is_not_loaded(
    way: str, planted: tuple[Path, Path], fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path, mark), (make, message) = planted, WAYS[way]
    make(path, monkeypatch)
    monkeypatch.setattr(shared_objects, "folders", lambda name: [path.parent])
    with pytest.warns(RuntimeWarning) as said:
        assert natives.native() is None
    assert not mark.exists()
    (text,) = [str(each.message) for each in said]
    assert text.startswith("fused operators run without their C++ kernels, by PyTorch alone and slower: ")
    assert message in text and "\n" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert natives.native() is None, "said once"
    assert natives.why_not() == "", "they run all the same"


@needs_compiler
def test_what_nobody_else_may_write_is_loaded(planted: tuple[Path, Path]) -> None:
    """So the tests above can fail: this one runs."""
    path, mark = planted
    shared_objects.load(path)
    assert mark.exists()


def test_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        made = shared_objects.private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(mask)
    assert made == (tmp_path / "a" / "b").resolve()
    assert [each.stat().st_mode & 0o777 for each in (made, made.parent)] == [0o700, 0o700]


def test_a_shared_folder_above_must_be_sticky(tmp_path: Path) -> None:
    above = tmp_path / "tmp"
    above.mkdir()
    above.chmod(0o1777)
    assert shared_objects.private_folder(above / "mine")
    above.chmod(0o777)
    with pytest.raises(OSError, match="mode 0777"):
        shared_objects.private_folder(above / "mine")


def test_no_half_of_a_file_is_ever_there(tmp_path: Path) -> None:
    path, mask = tmp_path / "x.so", os.umask(0)

    def fails(builder: Path) -> None:
        builder.write_bytes(b"half")
        assert not path.exists()
        raise KeyboardInterrupt

    def slowly(builder: Path) -> None:
        builder.write_bytes(b"who")
        assert shared_objects.build(path, lambda other: other.write_bytes(b"another's")).read_bytes() == b"another's"
        builder.write_bytes(b"whole")

    try:
        with pytest.raises(KeyboardInterrupt):
            shared_objects.build(path, fails)
        assert list(tmp_path.iterdir()) == []
        shared_objects.build(path, slowly)
        assert shared_objects.build(path, fails).read_bytes() == b"whole"
    finally:
        os.umask(mask)
    assert list(tmp_path.iterdir()) == [path] and path.stat().st_mode & 0o777 == 0o700


def test_where_built_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shared = Path(tempfile.gettempdir()) / f"shardplan-{os.geteuid()}-kernels"
    assert list(shared_objects.folders("kernels")) == [tmp_path / "shardplan" / "kernels", shared]
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert next(shared_objects.folders("kernels")) == tmp_path / ".cache" / "shardplan" / "kernels"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert list(shared_objects.folders("kernels")) == [shared]


@needs_compiler
def test_what_kernels_are_made_of_is_in_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMPILER is not None
    names = {natives.file_name(COMPILER)}
    other = tmp_path / "tiles.cpp"
    other.write_bytes(natives.SOURCE.read_bytes() + b"\n")
    for what, value in (("_processor", lambda: "another one"), ("FLAGS", ("-O0",)), ("SOURCE", other)):
        with monkeypatch.context() as patch:
            patch.setattr(natives, what, value)
            names.add(natives.file_name(COMPILER))
    names.add(natives.file_name("/bin/echo"))  # which says another version
    assert len(names) == 5
