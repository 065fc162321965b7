"""`python -m tests.wheel`: the wheel, built, installed without its sources under every Python that there is, and used.

`python -m tests.wheel --sdist`: the archive of sources, built, and installed from under this Python, and used likewise.

In an environment of its own and outside of the checkout: a plan is made, checked again and run, topologies are there
to be priced on, and neither tests nor frameworks come with it. Then five people have their first hour with it (three of
them under another Python, for which no frameworks are here).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Collection
from pathlib import Path

from tests.test_personas import NAMES, spend_first_hour

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TARGET = "f32[16@(data,tensor), 8]", "f32[16, 8@tensor]"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
USED = """
import sys, numpy as np, shardplan as sp
assert "site-packages" in sp.__file__, sp.__file__
mesh = sp.Mesh(data=2, tensor=4)
source, target = (sp.TensorType.parse(text, mesh) for text in ("f32[16@(data,tensor), 8]", "f32[16, 8@tensor]"))
plan = sp.redistribute(source, target, topology=sp.Topology.load("dgx-h100", nodes=1))
plan.certificate.check()
array = np.arange(128, dtype=np.float32).reshape(16, 8)
shards = sp.run(plan.program, sp.distribute(array, source))
assert np.array_equal(sp.collect(shards, target), array)
assert not {"torch", "jax", "pytest"} & sys.modules.keys()
"""
COMMANDS = (
    (
        "redistribute",
        "f32[16@(data,tensor), 8]",
        "f32[16, 8@tensor]",
        "--mesh",
        "data=2,tensor=4",
        "--out",
        "plan.json",
    ),
    ("check", "plan.json"),
    ("show", "plan.json"),
    ("bench", "reduction_peers"),
    ("audit", "--topology", "dgx-h100", "--nodes", "2", "--mesh", "data=2,tensor=8", "--traffic", "tensor=2GB"),
)


def pythons() -> list[str]:
    """Return the interpreters of the versions that there are, this one first."""
    found = [shutil.which(f"python{version}") for version in VERSIONS]
    return [sys.executable, *(path for path in found if path and not _is_version(path, sys.version_info[:2]))]


def _is_version(python: str, version: tuple[int, ...]) -> bool:
    asked = "import sys; print(*sys.version_info[:2])"
    said = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
    return said.returncode != 0 or tuple(map(int, said.stdout.split())) == version


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder."""
    build = ["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run([sys.executable, *build], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def build_sdist(folder: Path) -> Path:
    """Build the archive of sources by the backend in an environment of its own, and check what it has."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    environment = folder / "backend"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    inside = environment / "bin" / "python"
    subprocess.run([inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requires], check=True)
    subprocess.run([inside, "-m", "hatchling", "build", "-t", "sdist", "-d", folder], cwd=ROOT, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    check_sources(names)
    return archive


def check_sources(names: Collection[str]) -> None:
    """Raise where an archive's files, below its folder, are not those of the checkout that git knows."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    known = set(listed.stdout.splitlines())
    wanted = {name for name in known if name.startswith("src/")} | {"CHANGELOG.md", "LICENSE", "README.md", "Makefile"}
    more, less = sorted(set(names) - known - {"PKG-INFO"}), sorted(wanted - set(names))
    if more or less:
        raise AssertionError(f"the archive of sources has {more[:5]}, and lacks {less[:5]}")


def use_wheel(python: str, wheel: Path, folder: Path) -> None:
    """Install a wheel, or an archive of sources, into a new environment, and use it; raises where something fails."""
    environment = folder / "environment"
    subprocess.run([python, "-m", "venv", environment], check=True)
    inside = environment / "bin" / "python"
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
    subprocess.run([inside, *install], cwd=folder, check=True)
    subprocess.run([inside, "-I", "-c", USED], cwd=folder, check=True)
    for words in COMMANDS:
        subprocess.run([environment / "bin" / "shardplan", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    names = NAMES[:-2]
    if python == sys.executable:  # its frameworks are found behind what is installed; a checkout among them is not
        names = NAMES
        paths = {"base": str(environment), "platbase": str(environment)}
        (Path(sysconfig.get_path("purelib", vars=paths)) / "frameworks.pth").write_text(sysconfig.get_path("purelib"))
    for name in names:
        typed = folder / name
        typed.mkdir()
        spend_first_hour(name, typed, environment / "bin")
        print(f"{name}: reached the goal", flush=True)


def main(sdist: bool = False) -> None:
    """Build and use the wheel under every Python, or what the archive of sources gives under this one."""
    with tempfile.TemporaryDirectory() as name:
        wheel = (build_sdist if sdist else build_wheel)(Path(name))
        for number, python in enumerate([sys.executable] if sdist else pythons()):
            folder = Path(name) / str(number)
            folder.mkdir()
            use_wheel(python, wheel, folder)
            print(f"{wheel.name}: installed without its sources and used under {python}")


if __name__ == "__main__":
    main("--sdist" in sys.argv[1:])
