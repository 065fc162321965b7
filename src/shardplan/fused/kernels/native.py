"""The C++ kernels: built on first use, cached by what they are made of, and None where that cannot be done.

Where there is a compiler and it cannot be done all the same, a warning says why, once a process.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import warnings
from functools import cache
from pathlib import Path

from shardplan.errors import line
from shardplan.fused.kernels import shared_objects

SOURCE = Path(__file__).with_name("tiles.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
VERSION = 2
SECONDS = 120.0
ORDERED = ("x86_64", "AMD64", "i686")  # where plain stores of a core become visible in order

Kinds = {"f32": 0, "bf16": 1, "f16": 2}


class TileKernels:
    """The functions of `tiles.cpp`; addresses are ints, counts int64."""

    def __init__(self, path: Path) -> None:
        """Load it; raises `OSError` where it cannot be."""
        found = shared_objects.load(path)
        i64, i32, address = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
        found.shardplan_version.restype = i64
        if found.shardplan_version() != VERSION:
            raise OSError(f"{path} is of another version")
        self.signal = found.shardplan_signal
        self.signal.argtypes, self.signal.restype = (address, i32), None
        self.wait = found.shardplan_wait
        self.wait.argtypes, self.wait.restype = (address, i32, i64), ctypes.c_int
        self.check = found.shardplan_check
        self.check.argtypes, self.check.restype = (address,), i64
        self.bags = found.shardplan_bags
        self.bags.argtypes, self.bags.restype = (ctypes.c_int, address, address, i64, i64), None
        self.gemv = found.shardplan_gemv
        self.gemv.argtypes = (ctypes.c_int, address, i64, i64, i64, address, i64, address)
        self.gemv.restype = None
        self.one_shot = found.shardplan_one_shot
        self.one_shot.argtypes = (
            *(ctypes.c_int, address, i64, i64, i64, address, i64),
            *(address, address, i64, i64, i64, address, address, address),
        )
        self.one_shot.restype = i64


def compiler() -> str | None:
    """Return the path of a C++ compiler, None where there is none."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def file_name(made_by: str) -> str:
    """Return a name made of a hash of the source, the compiler's version and the processor.

    Raises `OSError` or `subprocess.SubprocessError` where the compiler does not run.
    """
    version = subprocess.run([made_by, "--version"], capture_output=True, check=True, timeout=SECONDS).stdout
    parts = (SOURCE.read_bytes(), version, _processor().encode(), " ".join(FLAGS).encode())
    return f"tiles-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:20]}.so"


def build(made_by: str, into: Path) -> Path:
    """Return the built file, made by this compiler unless it is there already; it appears whole or not at all.

    Raises `OSError`, as where others may write there, or `subprocess.SubprocessError`.
    """

    def make(builder: Path) -> None:
        command = [made_by, *FLAGS, "-o", str(builder), str(SOURCE)]
        subprocess.run(command, capture_output=True, check=True, timeout=SECONDS)

    return shared_objects.build(into / file_name(made_by), make)


@cache
def native() -> TileKernels | None:
    """Return the C++ kernels, None where no compiler makes them; built once a machine, loaded once a process."""
    if (made_by := compiler()) is None:
        return None
    reasons: list[str] = []
    for into in shared_objects.folders("kernels"):
        try:
            return TileKernels(build(made_by, into))
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(line(error))
    said = "fused operators run without their C++ kernels, by PyTorch alone and slower"
    warnings.warn(f"{said}: {'; '.join(reasons)}", RuntimeWarning, stacklevel=2)
    return None


def why_not() -> str:
    """Return why fused operators cannot run here, empty where they can."""
    if native() is None and platform.machine() not in ORDERED:
        lacks = "no C++ kernels, which need a compiler and a folder that is this user's alone"
        return f"{lacks}, and without them plain stores signal, which {platform.machine()} does not keep in order"
    return ""
