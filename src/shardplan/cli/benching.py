"""The command bench: the tables of the four papers' pages, worked out anew by the benchmark modules that need no more.

The wheel has these modules, and what they read, below `shardplan/bench`, laid out as in the checkout, which has them at
its root. A module is run as `python -m benchmarks.NAME` runs it there.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, NamedTuple, TextIO

import typer

from shardplan.cli.answers import print_object
from shardplan.cli.options import Json, check_writable
from shardplan.errors import MissingExtra, ShardplanError


class PaperTable(NamedTuple):
    """A benchmark: the page of which paper has its tables, what they say, and about how long it takes on one core."""

    paper: str
    tells: str
    takes: str


BENCHES = {
    "over_bound": PaperTable("2112.01075", "Seconds of moves over their lower bound.", "10 min"),
    "placement_set": PaperTable("2110.10548", "Reduction programs on the paper's systems.", "1 min"),
    "placement_beyond": PaperTable("2110.10548", "The same on other systems and sizes.", "15 min"),
    "reduction_peers": PaperTable("2110.10548", "Beside MSCCL's and ForestColl's programs.", "10 s"),
    "distir_parity": PaperTable("2111.05426", "DistIR's simulator, reproduced to 1e-9.", "1 min"),
    "distir_grids": PaperTable("2111.05426", "The grids of its two searches, by events.", "30 s"),
    "fused_published": PaperTable("2305.06942", "Whether to fuse, on published times.", "10 s"),
    "fused_dlrm": PaperTable("2305.06942", "A DLRM step on 128 nodes, fused and not.", "1 min"),
}


def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which; without one they are listed, with their papers.")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="How many cases are drawn; by default those of the page.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The result file; by default NAME.json here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Work out a table of one of the four papers' pages anew, print it, and write its figures to a file.

    Nothing but the package is needed. Seconds that are measured are of this machine; all other figures are the page's.
    """
    from shardplan.core import validation
    from shardplan.report.text import json_text

    if name is None:
        if count is not None or out is not None:
            raise ShardplanError("bench: --count and --out without NAME; legal with them is one of the list")
        print(json_text({k: b._asdict() for k, b in BENCHES.items()}) if as_json else bench_list())
        return
    validation.choice("bench: NAME", name, tuple(BENCHES), ShardplanError)
    out = Path(f"{name}.json") if out is None else out
    check_writable(out)
    words = [name, "--out", str(out.absolute()), *([] if count is None else ["--count", str(count)])]
    run_bench(name, words, sys.stderr if as_json else sys.stdout)
    if as_json:
        print_object(json.loads(out.read_text(encoding="utf-8")))


def bench_list() -> str:
    """Return the benchmarks, a line each: name, paper, about how long it takes, and what it tells."""
    rows = [f"{name:<17} {b.paper}  {b.takes:>6}  {b.tells}" for name, b in BENCHES.items()]
    return "\n".join([f"{'name':<17} paper       about  what it tells", *rows])


def run_bench(name: str, words: list[str], shown: TextIO) -> None:
    """Run a benchmark's module with the words of its command line; what it prints goes to `shown`.

    Its fresh processes find `benchmarks` where this one does.
    """
    root = str(bench_root())
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    before, argv = dict(os.environ), sys.argv
    sys.path.insert(0, root)
    try:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        sys.argv = words
        with redirect_stdout(shown):
            runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    finally:
        sys.path.remove(root)
        sys.argv = argv
        os.environ.clear()
        os.environ.update(before)


def bench_root() -> Path:
    """Return the folder that has `benchmarks`; raises `MissingExtra` where neither wheel nor checkout has it."""
    package = Path(__file__).resolve().parents[1]
    for root in (package / "bench", package.parents[1]):
        if (root / "benchmarks" / "common.py").is_file():
            return root
    raise MissingExtra("bench: the benchmarks are not installed beside shardplan; its wheel has them")
