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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shardplan.fused.triton.compile_ahead import compile_kernel, source_hash
from shardplan.fused.triton.product_tiles import ProductTile, tiles_of

BLOCKS = {"ranks": 8, "span": 8, "form": 0}
PUTS = {**BLOCKS, "sends": True, "acked": False}
KERNELS: dict[str, dict[str, Any]] = {
    "gemm": {
        "types": {"a": "*bf16", "b": "*bf16", "bias": "*bf16", "stamps": "*i64", "depth": "i32", "columns": "i32",
                  "like": "*bf16"},
        "constants": {
            "biased": False, "activation": 0, "upcast": False,
            "stamped": 0, **PUTS,
        },
        "aligned": ("a", "b", "bias", "like", "depth", "columns"),
        "options": {},
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
        "constants": {"ranks": 8, "wide": 1, "lanes": 1, "block_m": 16, "block_k": 256, "upcast": False},
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
        "constants": {"upcast": False, **BLOCKS, "form": 3},
        "aligned": ("out", "rows", "height", "b", "depth", "columns"),
        "options": {},
    },
    "grouped": {
        "types": {"a": "*bf16", "b": "*bf16", "counts": "*i64", "height": "i32", "depth": "i32", "columns": "i32",
                  "capacity": "i32", "like": "*bf16"},
        "constants": {
            "experts": 4, "numbers": 32, "upcast": False, **PUTS,
        },
        "aligned": ("a", "b", "like", "depth", "columns"),
        "options": {},
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
    "no barrier": ("memory_ops", "tl.debug_barrier()", "pass", "barrier"),
    "gpu scope": ("memory_ops", 'scope="sys"', 'scope="gpu"', "signal"),
}
Text = dict[str, str]
PRODUCTS = ("gemm", "gather", "grouped")
TARGETS = {"sm_90": "cuda", "gfx942": "hip"}


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


# By kernel: what must stand there on sm_90, and must not; and the same on gfx942.
_MOVES = ("ld\\.global\\.v4", "st\\.global\\.v4"), "st\\.global\\.b16"
_MOVES_AMD = ("global_load_dwordx4", "global_store_dwordx4"), "global_store_short"
_SUMS = ("ld\\.global\\.v4", "st\\.global\\.b32"), "st\\.global\\.v"
_SUMS_AMD = ("global_load_dwordx4", r"global_store_dword\b"), "global_store_dwordx4"
_PRODUCT = ("wgmma", "st\\.global\\.v4"), "st\\.global\\.b16"
_PRODUCT_F32 = ("fma\\.rn", "st\\.global\\.v4"), "wgmma"
_PRODUCT_AMD = ("v_mfma", "global_store_dwordx[24]"), "global_store_short"


def _is_wide(name: str, asm: str, nvidia: bool, variant: Variant) -> bool:
    """Whether loads, stores and products are those that the hardware is fastest at."""
    tile = variant.tile
    if tile is not None:
        has, without = (_PRODUCT_F32 if variant.width == 4 else _PRODUCT) if nvidia else _PRODUCT_AMD
        fetch = r"cp\.async\.bulk\.tensor" if tile.described else r"cp\.async\.c[ga]"
        has = (*has, fetch) if nvidia else has
    elif name == "gemv":
        has, without = _SUMS if nvidia else _SUMS_AMD
        if variant.constants:  # sums of several columns lie side by side
            has, without = ((r"cp\.async\.c[ga]",) if nvidia else has[:1]), "never"
        if not nvidia and asm.count("global_load_dwordx4") < asm.count("global_load_ushort"):
            return False  # the rows' own words are wide in any case: those of A must be, too
    else:
        has, without = _MOVES if nvidia else _MOVES_AMD
    return all(re.search(p, asm) for p in has) and not re.search(without, asm)


def findings(name: str, text: Text, variant: Variant) -> dict[str, bool]:
    """What holds of a kernel's text: wide words, and the signal, barrier before it and wait of those that do so."""
    waits = {"gemv": ("signal", "barrier", "wait", "wide"), "read": ("wait", "wide"), "gather": ("wait", "wide")}
    has = waits.get(name, ("signal", "barrier", "wide"))
    # In Triton's own text the barrier must stand whatever the version adds to machine code.
    source = _before(text["ttir"], r"atomic_rmw add, release", r"\bbarrier\b", r"tt\.store")
    if "ptx" in text:
        asm = text["ptx"]
        found = {
            "signal": bool(re.search(r"(red|atom)\.global\.sys\.release\.add", asm)) and ".gpu." not in asm,
            "barrier": source and _before(asm, r"(red|atom)\.\S*release\S*\.add", r"bar\.sync", r"st\.global"),
            "wait": bool(re.search(r"ld\.global\.sys\.acquire", asm)),
        }
    else:
        asm = text["amdgcn"]
        adds = r"buffer_wbl2(.*\n(?:(?!global_store).*\n){0,8}?\s*global_atomic_add )"  # a note swaps
        released = re.sub(adds, r"RELEASE\1", asm)
        release = r"buffer_wbl2 sc0 sc1\n(?:(?!global_store).*\n){0,8}?\s*global_atomic_add .*sc1"
        found = {
            "signal": bool(re.search(release, asm)),
            "barrier": source and _before(released, "RELEASE", r"s_barrier", r"global_store_(short|dwordx4)"),
            "wait": bool(re.search(r"global_(load|atomic_add).*sc1.*\n(?:.*\n){0,6}?\s*buffer_inv sc0 sc1", asm)),
        }
    found["wide"] = _is_wide(name, asm, "ptx" in text, variant)
    return {key: found[key] for key in has}


def resources(text: Text, warps: int) -> dict[str, int]:
    """Registers a thread, bytes spilled and bytes of shared memory, and how many programs of so many warps fit.

    Of sm_90 by the assembler that comes with Triton; of gfx942 as its text says, vector registers, on a compute unit of
    four times 512 of them a lane and 64 KiB.
    """
    shared = int(text["shared"])
    if "ptx" not in text:
        names = {"registers": r"\.vgpr_count:\s*(\d+)", "spilled": r"\.vgpr_spill_count:\s*(\d+)"}
        found = {name: int(hit[1]) for name, each in names.items() if (hit := re.search(each, text["amdgcn"]))}
        waves = min(8, 512 // max(1, -(-found["registers"] // 8) * 8)) * 4
        return found | {"shared": shared, "fit": min(waves // warps, (64 << 10) // max(1, shared))}
    folder = Path(importlib.import_module("triton").__path__[0]) / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "a.ptx").write_text(text["ptx"])
        said = ""
        for path in sorted(folder.glob("ptxas*")):  # of several the one that knows this version of the text
            command = [path, "-v", "--gpu-name=sm_90a", Path(made) / "a.ptx", "-o", Path(made) / "a.cubin"]
            said += subprocess.run(command, capture_output=True, text=True, check=False).stderr
    names = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}
    found = {name: int(hit[1]) for name, each in names.items() if (hit := re.search(each, said))}
    if len(found) < len(names):
        return found  # no assembler here that knows the text
    threads = 32 * warps
    by_registers = (64 << 10) // (-(-found["registers"] // 8) * 8 * threads)
    return found | {"shared": shared, "fit": min(by_registers, (228 << 10) // (shared + 1024), 64 // warps, 32)}


def kernel(name: str, package: str = "shardplan.fused.triton") -> Any:
    """A kernel by its operator's name."""
    prefix = f"{package}." if package else ""
    return getattr(importlib.import_module(f"{prefix}{name}_kernel"), f"{name}_kernel")


class Variant(NamedTuple):
    """What a kernel is compiled for: a tile, where it is a product, bytes of an operand, and constants."""

    tile: ProductTile | None = None
    width: int = 2
    constants: tuple[tuple[str, Any], ...] = ()

    def said(self) -> dict[str, Any]:
        """How a row names it."""
        tile = {} if self.tile is None else {"tile": [*self.tile.block], "described": self.tile.described}
        return {"bytes": self.width} | tile | dict(self.constants)


def text_of(name: str, target: str, found: Any, aligned: bool = True, variant: Variant | None = None) -> Text:
    """What Triton makes of a kernel, the first of its variants if none is given: of bf16, or of f32."""
    spec = KERNELS[name]
    tile, width, more = variant or next(variants(name, target))
    kind = {2: "bf16", 4: "fp32"}[width]
    types = {key: each.replace("bf16", kind) for key, each in spec["types"].items()}
    constants, options = {"programs": 132, **spec["constants"], "aligned": aligned, **dict(more)}, spec["options"]
    names = [each for each in spec["aligned"] if aligned]
    if tile is not None:
        m, n, k = tile.block
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        constants |= tile.names | ({} if name == "gather" else {"described": tile.described})
        if tile.described:
            types |= {"a": f"tensordesc<{kind}[{m}, {k}]>", "b": f"tensordesc<{kind}[{k}, {n}]>"}
            names = [each for each in names if each not in "ab"]
    return compile_kernel(found, types, constants, target, names, **options)


OTHERS = {
    "embedding": [Variant(None, 4, (("block_b", 8), ("block_d", 256), ("weighted", True), ("mean", True)))],
    "gemv": [
        Variant(None, 2, (("wide", 16), ("lanes", 16))),
        Variant(None, 4),
        Variant(None, 4, (("wide", 16), ("lanes", 16))),
    ],
}


def variants(name: str, target: str) -> Iterator[Variant]:
    """What a kernel is compiled for: of `gemm` all tiles of the table; none is described of what lies in a heap."""
    if name not in PRODUCTS:
        yield from (Variant(), *OTHERS.get(name, ()))
        return
    for width in (2, 4):
        tiles = [tile for tile in tiles_of(TARGETS[target], width) if name != "gather" or not tile.described]
        yield from (Variant(tile, width) for tile in tiles[: None if name == "gemm" else 1])


def altered(module: str, old: str, new: str, folder: Path) -> Callable[[str], Any]:
    """The kernels with a part of their source replaced, as modules in a folder of their own."""
    here = Path(importlib.import_module("shardplan.fused.triton").__path__[0])
    number = len(list(folder.iterdir()))
    own = folder / f"altered{number}"
    own.mkdir()
    (own / "__init__.py").write_text("")
    for path in [here / "memory_ops.py", *here.glob("*_kernel.py")]:
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
            for each in variants(name, target):
                text = text_of(name, target, kernel(name), True, each)
                warps = KERNELS[name]["options"]["num_warps"] if each.tile is None else each.tile.warps
                found = findings(name, text, each) | {"resources": resources(text, warps)}
                row = {"kernel": name, "target": target, "source": source_hash(kernel(name)), "variant": each.said()}
                rows.append(row | found)
    controls: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        sys.path.insert(0, made)
        for what, (module, old, new, fails) in ALTERED.items():
            find = altered(module, old, new, Path(made)) if module else kernel
            for target in targets:
                for name in KERNELS if not module else ("gemm",):
                    text = text_of(name, target, find(name), aligned=bool(module))
                    said = findings(name, text, next(variants(name, target)))
                    failed = sorted(key for key, good in said.items() if not good)
                    controls.append({"kernel": name, "target": target, "altered": what, "fails": failed, "must": fails})
        sys.path.remove(made)
    return {"triton": triton.__version__, "rows": rows, "controls": controls}


if __name__ == "__main__":
    print(json.dumps(everything()))
