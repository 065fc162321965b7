"""What must stand in the text that Triton compiles of the fused kernels, and altered kernels of which it must not.

Run as a module it prints, for the Triton that is installed, what holds for each kernel and target, as JSON.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardplan.fused.triton.compile_ahead import compile_kernel, source_hash

BLOCKS = {"ranks": 8, "span": 8, "form": 0}
PUTS = {**BLOCKS, "sends": True, "acked": False}
KERNELS: dict[str, dict[str, Any]] = {
    "gemm": {
        "types": {"a": "*bf16", "b": "*bf16", "bias": "*bf16", "stamps": "*i64", "depth": "i32", "columns": "i32",
                  "like": "*bf16"},
        "constants": {
            "block_m": 128, "block_n": 128, "block_k": 64, "biased": False, "activation": 0, "upcast": False,
            "stamped": 0, "remote_first": True, **PUTS,
        },
        "aligned": ("a", "b", "bias", "like", "depth", "columns"),
        "options": {"num_warps": 8, "num_stages": 3},
    },
    "embedding": {
        "types": {
            "like": "*bf16", "tables": "*i64", "lengths": "*i64", "indices": "*i64", "offsets": "*i64",
            "scale": "*fp32", "dim": "i32", "batch": "i32", "ids": "i32",
        },
        "constants": {"block_b": 16, "block_d": 128, "weighted": False, "mean": False, **PUTS, "form": 2},
        "aligned": ("like", "tables", "indices", "offsets", "scale", "dim"),
        "options": {"num_warps": 4},
    },
    "gemv": {
        "types": {"a": "*bf16", "x": "*bf16", "parts": "*fp32", "out": "*bf16", "height": "i32"},
        "constants": {"ranks": 8, "wide": 1, "block_m": 16, "block_k": 512},
        "aligned": ("a", "x", "parts", "out"),
        "options": {"num_warps": 4},
    },
    "move": {
        "types": {"g": "*bf16", "columns": "i32"},
        "constants": {"block_m": 16, "block_n": 128, **PUTS},
        "aligned": ("g", "columns"),
        "options": {"num_warps": 4},
    },
    "gather": {
        "types": {"out": "*bf16", "rows": "*bf16", "height": "i32", "b": "*bf16", "depth": "i32", "columns": "i32"},
        "constants": {"block_m": 128, "block_n": 128, "block_k": 64, "upcast": False, **BLOCKS, "form": 3},
        "aligned": ("out", "rows", "height", "b", "depth", "columns"),
        "options": {"num_warps": 8, "num_stages": 3},
    },
    "grouped": {
        "types": {"a": "*bf16", "b": "*bf16", "counts": "*i64", "height": "i32", "depth": "i32", "columns": "i32",
                  "capacity": "i32", "like": "*bf16"},
        "constants": {
            "experts": 4, "numbers": 32, "block_m": 128, "block_n": 128, "block_k": 64, "upcast": False, **PUTS,
        },
        "aligned": ("a", "b", "like", "depth", "columns"),
        "options": {"num_warps": 8, "num_stages": 3},
    },
    "read": {
        "types": {"out": "*bf16", "pitch": "i32", "columns": "i32"},
        "constants": {"block_m": 16, "block_n": 128, "copies": True, "adds": False, **BLOCKS},
        "aligned": ("out", "pitch", "columns"),
        "options": {"num_warps": 4},
    },
}  # fmt: skip
# Altered sources: name, module, what is replaced, by what, and which of the findings must fail.
ALTERED = {
    "no hint": ("", "", "", "wide"),
    "no barrier": ("words", "tl.debug_barrier()", "pass", "barrier"),
    "gpu scope": ("words", 'scope="sys"', 'scope="gpu"', "signal"),
}
Text = dict[str, str]


def _before(text: str, what: str, barrier: str, store: str) -> bool:
    """Whether a barrier stands between the last store before `what` and it; of all places one at least has it."""
    lines = text.splitlines()
    at = [k for k, line in enumerate(lines) if re.search(what, line)]
    good = 0
    for k in at:
        barriers = [j for j in range(k) if re.search(barrier, lines[j])]
        stores = [j for j in range(k) if re.search(store, lines[j])]
        good += bool(barriers) and barriers[-1] > max(stores, default=-1)
    return bool(at) and good == len(at)


def _wide_nvidia(name: str, ptx: str) -> bool:
    has = {
        "gemm": ("wgmma", r"cp\.async\.cg", r"st\.global\.v4"),
        "embedding": (r"ld\.global\.v4", r"st\.global\.v4"),
        "gemv": (r"ld\.global\.v4", r"st\.global\.b32"),
        "move": (r"ld\.global\.v4", r"st\.global\.v4"),
        "read": (r"ld\.global\.v4", r"st\.global\.v4"),
        "gather": ("wgmma", r"cp\.async\.cg", r"st\.global\.v4"),
        "grouped": ("wgmma", r"cp\.async\.cg", r"st\.global\.v4"),
    }
    not_ = {
        "gemm": r"st\.global\.b16",
        "embedding": r"st\.global\.b16",
        "gemv": r"st\.global\.v",
        "move": r"st\.global\.b16",
        "read": r"st\.global\.b16",
        "gather": r"st\.global\.b16",
        "grouped": r"st\.global\.b16",
    }
    return all(re.search(p, ptx) for p in has[name]) and not re.search(not_[name], ptx)


def _wide_amd(name: str, text: str) -> bool:
    has = {
        "gemm": ("v_mfma", "global_store_dwordx2"),
        "embedding": ("global_load_dwordx4", "global_store_dwordx4"),
        "gemv": ("global_load_dwordx4", r"global_store_dword\b"),
        "move": ("global_load_dwordx4", "global_store_dwordx4"),
        "read": ("global_load_dwordx4", "global_store_dwordx4"),
        "gather": ("v_mfma", "global_store_dwordx2"),
        "grouped": ("v_mfma", "global_store_dwordx2"),
    }
    not_ = {
        "gemm": "global_store_short",
        "embedding": "global_store_short",
        "gemv": "global_store_dwordx4",
        "move": "global_store_short",
        "read": "global_store_short",
        "gather": "global_store_short",
        "grouped": "global_store_short",
    }
    if name == "gemv" and text.count("global_load_dwordx4") < text.count("global_load_ushort"):
        return False  # the rows' own words are wide in any case: those of A must be, too
    return all(re.search(p, text) for p in has[name]) and not re.search(not_[name], text)


def findings(name: str, text: Text) -> dict[str, bool]:
    """What holds of a kernel's text: wide words, and the signal, barrier before it and wait of those that do so."""
    waits = {"gemv": ("signal", "barrier", "wait", "wide"), "read": ("wait", "wide"), "gather": ("wait", "wide")}
    has = waits.get(name, ("signal", "barrier", "wide"))
    return {key: good for key, good in _everything(name, text).items() if key in has}


def _everything(name: str, text: Text) -> dict[str, bool]:
    # In Triton's own text the barrier must stand whatever the version adds to machine code.
    source = _before(text["ttir"], r"atomic_rmw add, release", r"\bbarrier\b", r"tt\.store")
    if "ptx" in text:
        ptx = text["ptx"]
        return {
            "signal": bool(re.search(r"(red|atom)\.global\.sys\.release\.add", ptx)) and ".gpu." not in ptx,
            "barrier": source and _before(ptx, r"(red|atom)\.\S*release\S*\.add", r"bar\.sync", r"st\.global"),
            "wait": bool(re.search(r"ld\.global\.sys\.acquire", ptx)),
            "wide": _wide_nvidia(name, ptx),
        }
    asm = text["amdgcn"]
    release = r"buffer_wbl2 sc0 sc1\n(?:(?!global_store).*\n){0,8}?\s*global_atomic_add .*sc1"
    return {
        "signal": bool(re.search(release, asm)),
        "barrier": source and _before(asm, r"buffer_wbl2", r"s_barrier", r"global_store_(short|dwordx4)"),
        "wait": bool(re.search(r"global_(load|atomic_add).*sc1.*\n(?:.*\n){0,6}?\s*buffer_inv sc0 sc1", asm)),
        "wide": _wide_amd(name, asm),
    }


def resources(text: Text) -> dict[str, int]:
    """Registers a thread and bytes that are spilled, by the assembler that comes with Triton; empty for AMD."""
    if "ptx" not in text:
        return {}
    folder = Path(importlib.import_module("triton").__path__[0]) / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "a.ptx").write_text(text["ptx"])
        said = ""
        for path in sorted(folder.glob("ptxas*")):  # of several the one that knows this version of the text
            command = [path, "-v", "--gpu-name=sm_90a", Path(made) / "a.ptx", "-o", Path(made) / "a.cubin"]
            said += subprocess.run(command, capture_output=True, text=True, check=False).stderr
    names = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}
    return {name: int(found[1]) for name, each in names.items() if (found := re.search(each, said))}


def kernel(name: str, package: str = "shardplan.fused.triton") -> Any:
    """A kernel by its operator's name."""
    prefix = f"{package}." if package else ""
    return getattr(importlib.import_module(f"{prefix}{name}_kernel"), f"{name}_kernel")


def text_of(name: str, target: str, found: Any, aligned: bool = True) -> Text:
    """What Triton makes of a kernel of bf16."""
    spec = KERNELS[name]
    constants = {"programs": 132, **spec["constants"], "aligned": aligned}
    return compile_kernel(
        found, spec["types"], constants, target, spec["aligned"] if aligned else (), **spec["options"]
    )


def altered(module: str, old: str, new: str, folder: Path) -> Callable[[str], Any]:
    """The kernels with a part of their source replaced, as modules in a folder of their own."""
    here = Path(importlib.import_module("shardplan.fused.triton").__path__[0])
    number = len(list(folder.iterdir()))
    own = folder / f"altered{number}"
    own.mkdir()
    (own / "__init__.py").write_text("")
    for path in [here / "words.py", *here.glob("*_kernel.py")]:
        text = path.read_text()
        if path.stem == module:
            assert old in text, f"{old!r} is not in {path.name}"
            text = text.replace(old, new)
        (own / path.name).write_text(text.replace("shardplan.fused.triton.", f"{own.name}."))
    return lambda name: kernel(name, own.name)


def everything(targets: tuple[str, ...] = ("sm_90", "gfx942")) -> dict[str, Any]:
    """All kernels on all targets, and what an altered one fails."""
    import triton

    rows: list[dict[str, Any]] = []
    for target in targets:
        for name in KERNELS:
            text = text_of(name, target, kernel(name))
            found = findings(name, text) | {"resources": resources(text)}
            rows.append({"kernel": name, "target": target, "source": source_hash(kernel(name))} | found)
    controls: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        sys.path.insert(0, made)
        for what, (module, old, new, fails) in ALTERED.items():
            find = altered(module, old, new, Path(made)) if module else kernel
            for target in targets:
                for name in KERNELS if not module else ("gemm",):
                    text = text_of(name, target, find(name), aligned=bool(module))
                    said = findings(name, text)
                    failed = sorted(key for key, good in said.items() if not good)
                    controls.append({"kernel": name, "target": target, "altered": what, "fails": failed, "must": fails})
        sys.path.remove(made)
    return {"triton": triton.__version__, "rows": rows, "controls": controls}


if __name__ == "__main__":
    print(json.dumps(everything()))
