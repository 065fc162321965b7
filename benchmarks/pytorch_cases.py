"""PyTorch's own redistribution tests on gloo, with `DTensor.redistribute` replaced by the drop-in, beside the original.

`python -m benchmarks.pytorch_cases PATH_TO_test_redistribute.py` (the file of the installed version; it is not part of
this repository). Each test method runs on real processes, one a rank, three ways: as it is; with the drop-in; with the
drop-in and without the assertions on how many of DTensor's own collectives ran (`CommDebugMode`), which say nothing of
results. Calls with `forward_dtype` or `backward_dtype`, which the drop-in does not have, go to DTensor and are counted.
PyTorch's test helpers need `expecttest`.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, record, table, write

WAYS = {
    "as it is": "DTensor's own redistribute",
    "ours": "the drop-in in its place",
    "ours, uncounted": "the drop-in; assertions on counts of DTensor's collectives are left out",
}
CALLS: Counter[str] = Counter()  # of this process: who answered a call of DTensor.redistribute
WAIT = timedelta(seconds=60)


class Count:
    """A number of collectives that no assertion is held against."""

    def __getitem__(self, key: Any) -> Count:
        return self


def load(path: Path) -> Any:
    """Import the test file; tests that ask for GPUs run on the CPU."""
    from torch.testing._internal import common_distributed

    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    spec = importlib.util.spec_from_file_location("pytorch_test_redistribute", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cases(module: Any) -> tuple[list[tuple[type, str, int]], dict[str, str]]:
    """The test methods with the ranks that they want, and the classes that cannot run here with the reason."""
    from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, LocalDTensorTestBase

    found: list[tuple[type, str, int]] = []
    left: dict[str, str] = {}
    for name, kind in vars(module).items():
        if not (isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == module.__name__):
            continue
        methods = unittest.TestLoader().getTestCaseNames(kind)
        if issubclass(kind, LocalDTensorTestBase) or "LocalTensor" in name:
            left[name] = f"{len(methods)} tests: all ranks simulated in one process, without messages"
        elif not issubclass(kind, DTensorTestBase):
            left[name] = f"{len(methods)} tests: no process group, or one of threads or of fakes"
        else:
            found += [(kind, method, kind.__new__(kind).world_size) for method in methods]
    return found, left


def patch(way: str) -> None:
    """Put the drop-in in the place of `DTensor.redistribute`, in this process."""
    if way == "as it is":
        return
    from torch.distributed.tensor import DTensor

    from shardplan.interop.torch import redistribute

    original = DTensor.redistribute

    @functools.wraps(original)
    def ours(
        self: Any, device_mesh: Any = None, placements: Any = None, *, async_op: bool = False,
        forward_dtype: Any = None, backward_dtype: Any = None,
    ) -> Any:  # fmt: skip
        if forward_dtype is not None or backward_dtype is not None:
            CALLS["DTensor, for forward_dtype or backward_dtype"] += 1
            return original(
                self, device_mesh, placements, async_op=async_op, forward_dtype=forward_dtype,
                backward_dtype=backward_dtype,
            )  # fmt: skip
        CALLS["ours"] += 1
        return redistribute(self, placements, device_mesh, async_op=async_op, timeout=WAIT.total_seconds() / 4)

    DTensor.redistribute = ours


def outcome(kind: type, method: str, rank: int, world: int, meeting: Path, way: str) -> str:
    """Run one test method on this rank: `passed`, `skipped: ...` or `failed: ...`."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.common_utils import set_rng_seed

    case: Any = kind(method)
    set_rng_seed(1234)  # as every test's setUp does, which would start processes of its own: ranks draw alike
    case.rank, case.file_name = rank, str(meeting)

    def start(*_: Any, **__: Any) -> None:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=WAIT / 2)

    case.init_pg = start
    if way == "ours, uncounted":
        compare = case.assertEqual
        case.assertEqual = lambda a, b, *more, **named: (
            None if isinstance(a, Count) or isinstance(b, Count) else compare(a, b, *more, **named)
        )
        CommDebugMode.get_total_counts = CommDebugMode.get_comm_counts = lambda self: Count()
    try:
        getattr(case, method)()
    except unittest.SkipTest as reason:
        return f"skipped: {reason}"
    except SystemExit as reason:
        return f"skipped: exit status {reason.code}"
    except Exception as error:
        lines = [x for x in str(error).splitlines() if x.strip()]
        return f"failed: {type(error).__name__}: {' '.join(lines[:3])[:200]}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "passed"


def on_rank(path: Path, way: str, folder: Path) -> None:
    """All tests for as many ranks as there are; rank 0 writes what came out of them."""
    import torch.distributed as dist

    from shardplan.execution.torch import group_state
    from shardplan.interop.torch import moves

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told = dist.FileStore(str(folder / "told"), world)
    told.set_timeout(4 * WAIT)
    chosen, _ = cases(load(path))
    patch(way)
    results: dict[str, list[str]] = {}
    answered: dict[str, dict[str, int]] = {}
    for kind, method, wanted in chosen:
        name = f"{kind.__name__}.{method}"
        if wanted != world:
            continue
        CALLS.clear()
        # a test that failed may have left the ranks apart
        for kept in (moves._moves, group_state._states):
            kept.clear()
        told.set(f"{name} {rank}", outcome(kind, method, rank, world, folder / name, way))
        keys = [f"{name} {r}" for r in range(world)]
        told.wait(keys)
        results[name] = [told.get(key).decode() for key in keys]
        answered[name] = dict(CALLS)
    if rank == 0:
        text = json.dumps({"results": results, "answered": answered})
        (folder / f"{world}.json").write_text(text, encoding="utf-8")


def launch(path: Path, way: str, worlds: list[int], seconds: float) -> dict[str, Any]:
    """Run the tests one way, in one launch for each number of ranks."""
    found: dict[str, Any] = {"results": {}, "answered": {}}
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
                       "-m", "benchmarks.pytorch_cases", str(path), "--way", way, "--folder", folder]  # fmt: skip
            where = os.pathsep.join([str(ROOT), str(ROOT / "src"), *sys.path[1:]])
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": where}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
            )  # fmt: skip
            file = Path(folder) / f"{world}.json"
            if not file.exists():
                raise SystemExit(f"{way}, {world} ranks: exit status {done.returncode}\n{done.stderr[-3000:]}")
            part = json.loads(file.read_text(encoding="utf-8"))
            found["results"] |= part["results"]
            found["answered"] |= part["answered"]
    return found


def worst(outcomes: list[str]) -> str:
    """What to say of a test: the first failure of a rank, or what all ranks say."""
    return next((x for x in outcomes if x.startswith("failed")), outcomes[0])


def kind_of(text: str) -> str:
    return text.partition(":")[0]


def compare(path: Path, seconds: float, rows_of: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Run the file all ways; one row a test, and counts."""
    chosen, left = cases(load(path))
    runs = {way: rows_of(way) for way in WAYS}
    rows: list[dict[str, Any]] = []
    for kind, method, world in chosen:
        name = f"{kind.__name__}.{method}"
        said = {way: worst(run["results"][name]) for way, run in runs.items()}
        rows.append({"test": name, "ranks": world} | said | {"calls": runs["ours"]["answered"][name]})
    calls = sum((Counter(r["calls"]) for r in rows), Counter[str]())
    counts = {way: Counter(kind_of(r[way]) for r in rows) for way in WAYS}
    return {
        "tests": len(rows),
        "counts": counts,
        "calls_of_rank_0": calls,
        "fail_only_on_counts_of_collectives": [
            r["test"] for r in rows if kind_of(r["ours"]) == "failed" and r["ours, uncounted"] == "passed"
        ],
        "fail_with_ours": {
            r["test"]: r["ours, uncounted"] for r in rows
            if kind_of(r["ours, uncounted"]) == "failed" and r["as it is"] == "passed"
        },
        "fail_as_they_are": {r["test"]: r["as it is"] for r in rows if kind_of(r["as it is"]) == "failed"},
        "without_a_call_of_ours": [r["test"] for r in rows if not r["calls"].get("ours")],
        "not_applicable": left,
        "rows": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pytorch_cases", description=(__doc__ or "").strip())
    parser.add_argument("path", type=Path, help="test/distributed/tensor/test_redistribute.py of PyTorch")
    parser.add_argument("--seconds", type=float, default=900, help="the most that one launch may take")
    parser.add_argument("--about", default="", help="where the file comes from, for the record")
    parser.add_argument("--out", type=Path, default=RESULTS / "pytorch_cases.json", help="the result file")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # set in the processes of a launch
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        on_rank(given.path, given.way, given.folder)
        return
    path = given.path.resolve()
    text = path.read_text(encoding="utf-8")
    worlds = sorted({world for _, _, world in cases(load(path))[0]})
    result = compare(path, given.seconds, lambda way: launch(path, way, worlds, given.seconds))
    rows = [[way, *(result["counts"][way][k] for k in ("passed", "failed", "skipped"))] for way in WAYS]
    print(table(["way", "passed", "failed", "skipped"], rows, f"{result['tests']} tests of {path.name}"))
    for name, why in result["fail_with_ours"].items():
        print(f"fails with ours: {name}: {why}")
    digest = hashlib.sha256(text.encode()).hexdigest()
    about = {"file": path.name, "characters": len(text), "sha256": digest, "about": given.about, "ways": WAYS}
    write(given.out, record(about, result))


if __name__ == "__main__":
    main()
