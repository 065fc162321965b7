"""Writes the tables of `docs/results.md` from the committed result files, and finds figures in its text that are none.

`python -m benchmarks.results_page` writes every table that stands between `<!-- table: NAME -->` and
`<!-- end of table -->`; the text around them is written by hand, and `figures` are the phrases in it that result files
say: one that the page lacks is printed, and the status is 1. `--check` writes nothing. A test asks for both.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from benchmarks.common import RESULTS, ROOT

PAGE = ROOT / "docs" / "results.md"
_TABLE = re.compile(r"(?P<head><!-- table: (?P<name>[a-z ]+) -->\n\n).*?(?P<tail>\n<!-- end of table -->)", re.S)
MILLION = 1_000_000


@lru_cache
def result(name: str) -> dict[str, Any]:
    """A committed result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def short(value: float, digits: int = 2) -> str:
    """A number to so many significant digits, with commas, without an exponent."""
    shown = float(f"{value:.{digits - 1}e}")
    return f"{shown:,.0f}" if shown >= 10 ** (digits - 1) else f"{shown:.{digits}g}"


def percent(value: float) -> str:
    """Percent: one decimal below ten, none above."""
    return f"{value:.1f} %" if value < 9.95 else f"{value:.0f} %"


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The text of a table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headers, *rows)]
    return "\n".join([lines[0], "|---" * len(headers) + "|", *lines[1:], ""])


# --- what strategies move: a row's name, its rows of GSPMD (plain, constrained further), of DTensor (with a remark)

_STRATEGIES: list[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]] = [
    ("data 8", ("data 8",), (("data 8", ""),)),
    (
        "tensor 4 x data 2",
        ("tensor 4 x data 2",),
        (("tensor 4 x data 2", ""), ("tensor 4 x data 2, inputs prepared", "+")),
    ),
    ("sequence 4 x data 2", ("sequence 4 x data 2", "sequence 4 x data 2, inside too"), (("sequence 4 x data 2", ""),)),
    ('the same, `keep="sequence"`', (), (("sequence 4 x data 2, kept", ""),)),
    ("fsdp 8", ("fsdp 8", "fsdp 8, weights too"), (("fsdp 8", ""), ("fsdp 8, kept by the peer", " kept gathered"))),
    ("the same, `zero=2`", ("", "fsdp 8, weights kept"), (("fsdp 8, kept", " kept gathered"),)),
    ("Ulysses: context 4 x data 2", ("context 4 x data 2", "context 4 x data 2, heads too"), ()),
    ("gathered keys: context 4 x data 2", ("gathered keys 4 x data 2", "gathered keys 4 x data 2, keys too"), ()),
    ('the same, `keep="sequence"`', ("", "gathered keys 4 x data 2, keys kept"), ()),
    ("experts: expert 8", ("expert 8", "expert 8, both ways"), ()),
    ("expert 4 x data 2", ("expert 4 x data 2",), ()),
]


def _ratio(value: float, remark: str = "") -> str:
    shown = f"{value:.2f}".rstrip("0").rstrip(".") + (remark if remark == "+" else "")
    return (f"**{shown}**" if value < 0.995 else shown) + (remark if remark != "+" else "")


def strategies() -> str:
    """Bytes a layer, ours, and the peers' over them."""
    gspmd = {row["strategy"]: row for row in result("strategy_gspmd")["rows"]}
    dtensor = {row["strategy"]: row for row in result("strategy_dtensor")["rows"]}
    rows: list[list[str]] = []
    for name, theirs, others in _STRATEGIES:
        first = gspmd[next(n for n in theirs if n)] if theirs else dtensor[others[0][0]]
        cells = [name, f"{first['ours']['layer']['received']:,}"]
        for key in ("ratio", "ratio, scattered"):
            said = [_ratio(gspmd[n][key], "+" if k else "") for k, n in enumerate(theirs) if n]
            cells.append(", ".join(said) or "not counted")
        cells.append(", ".join(_ratio(dtensor[n]["ratio"], remark) for n, remark in others) or "no such plan")
        rows.append(cells)
    return markdown(["strategy", "ours", "GSPMD over ours", "scattered", "DTensor over ours"], rows)


_FREE: list[tuple[str, str, str]] = [  # a row's name, how its strategies begin, a remark
    ("data 8", r"data 8$", ""),
    ("tensor 4 x data 2", r"tensor 4 x data 2$", ""),
    ("sequence 4 x data 2", r"sequence", ": the axis serves heads and features alone"),
    ("fsdp 8", r"fsdp 8($|, weights too$)", ": every device does everything"),
    ("context 4 x data 2", r"context", ": the axis serves little"),
    ("gathered keys 4 x data 2", r"gathered keys 4 x data 2($|, keys too)", ": the axis serves little"),
    ("the same, keys kept", r"gathered.*kept", ""),
    ("experts", r"expert", ""),
]


def free_annotations() -> str:
    """Microseconds a layer with and without *serve*, beside GSPMD's."""
    rows: list[list[str]] = []
    for name, pattern, remark in _FREE:
        found = [row for row in result("strategy_gspmd")["rows"] if re.match(pattern, row["strategy"])]
        ours = [short(1e6 * row["ours"]["layer"]["seconds"], 3) for row in found]
        theirs = sorted(1e6 * row[key]["layer"]["seconds"] for row in found for key in ("gspmd", "gspmd, scattered"))
        free = found[0]["ours without serve"]
        if "layer" in free:
            work = free["flops, times those with serve"]
            cells = [
                short(1e6 * free["layer"]["seconds"], 3),
                f"{free['layer']['received']:,}, {short(work, 3)}{remark}",
            ]
        else:
            cells = ["refused: " + free["refused"].partition(": ")[2], ""]
        spread = list(dict.fromkeys(short(x, 3) for x in (theirs[0], theirs[-1])))
        rows.append([name, ", ".join(dict.fromkeys(ours)), *cells, " to ".join(spread)])
    return markdown(
        ["annotations", "ours with *serve*, us", "free, us", "free: bytes, operations over those with *serve*",
         "GSPMD, us"], rows,
    )  # fmt: skip


def schedule_gaps() -> str:
    """How far generated schedules are from the shortest."""
    found = result("schedule_gaps")["summary"]["gaps, percent"]
    names: dict[str, str] = {"listed": "list scheduler"} | {
        n: f"{n} (B whole)" for n in ("1f1b", "gpipe", "interleaved", "looped-bfs")
    }
    order = sorted(found, key=lambda n: (n in names and n != "listed", found[n]["mean"]))
    return markdown(
        ["schedule", "shops", "at the optimum", "mean gap", "largest"],
        [
            [names.get(n) or n, str(g["shops"]), str(g["at the optimum"]), f"{g['mean']:.2g} %", f"{g['max']:.2g} %"]
            for n in order
            for g in [found[n]]
        ],
    )


def pipelines() -> str:
    """Schedules simulated a second, by events and in closed form."""
    rows: list[list[str]] = []
    for row in result("sweep_speed")["rows"]:
        chunks = f", {row['interleave']} chunks" if row["schedule"] == "interleaved" else ""
        rows.append([
            row["schedule"] + chunks, short(row["events a second, cold"]),
            f"{row['closed a second'] / MILLION:.1f} million", f"{row['closed / events']:.3f}",
            f"{row['without ways']:.3f}", short(row["replay a second"]),
        ])  # fmt: skip
    return markdown(
        ["schedule", "events, cold", "closed form", "closed form / events, mean", "without ways", "a replay in Python"],
        rows,
    )


def searches() -> str:
    """The search of the best plan, and the grids of DistIR."""
    search, grids = result("search_405b"), result("distir_grids")
    gpt, mlp = grids["gpt"], grids["mlp"]
    return markdown(
        ["what", "figure"],
        [
            ["strategies, also counted by plain loops", f"{search['counted']:,}, {search['counted by loops']:,}"],
            ["priced behind the floors", f"{search['priced']:,}"],
            [f"seconds ({search['asked']:g} asked)", short(search["seconds"])],
            [f"seconds without pruning: the same ten best, the same front of {search['front']}",
             short(search["without pruning"]["seconds"], 3)],
            [f"strategies priced one by one again, {search['parameters']['count']}: farthest apart",
             f"{search['farthest apart one by one']:g}"],
            ["closed form, distinct strategies a second, cold, so loaded",
             short(search["closed form"]["a second, cold"])],
            [f"DistIR's GPT grid by events, {gpt['configurations']:,} configurations ({gpt['asked']:g} asked; DistIR "
             "about 5 CPU-hours)", short(gpt["seconds"])],
            [f"DistIR's MLP grid by events, {mlp['configurations']:,} configurations ({mlp['asked']:g} asked; DistIR "
             "about 20 minutes)", short(mlp["seconds"])],
        ],
    )  # fmt: skip


_SOURCES = {
    "bloom_jz": "BLOOM, both eras",
    "llm_foundry": "llm-foundry (MPT), three machines",
    "simumax_b200": "SimuMax dense",
    "simumax_moe_b200": "SimuMax mixture of experts",
    "bridge_dense": "Megatron-Bridge dense",
    "vtrain_single": "vTrain, one node",
    "vtrain_multi": "vTrain, several nodes",
    "sc21_table1": "arXiv 2104.04473, table 1",
    "korthikanti_tab5": "arXiv 2205.05198, table 5",
    "torchtitan_202412": "torchtitan",
}


def _asked(row: dict[str, Any]) -> str:
    said = {k: v for k, v in row["asked"].items() if k != "p90"}
    missed = any(round(row[k], 1) > v for k, v in said.items())
    return ", ".join(f"{k} {v:g}" for k, v in said.items()) + (": missed" if missed else "")


def step_accuracy() -> str:
    """Errors of held-out steps, source by source, beside those of the result before."""
    now, before = (
        {row["source"]: row for row in result(name)["errors"] if row["quantity"] == "seconds_per_step"}
        for name in ("step_accuracy", "step_accuracy_before")
    )
    intervals = {row["source"]: row for row in result("step_accuracy")["intervals"]}
    rows = [
        [
            name, str(now[key]["count"]), percent(now[key]["mean"]), percent(now[key]["median"]),
            percent(now[key]["p90"]), percent(before[key]["mean"]), f"{intervals[key]['covered']:.0f} %",
            f"{intervals[key]['median half width']:.0f} %", _asked(now[key]),
        ]
        for key, name in _SOURCES.items()
    ]  # fmt: skip
    return markdown(
        [
            "source, seconds a step",
            "held out",
            "mean",
            "median",
            "p90",
            "mean before",
            "covered",
            "half width",
            "asked",
        ],
        rows,
    )


_LOCKED = {
    "layouts": "arXiv 2311.05610, LLaMA 13B to 65B on A100",
    "nemo": "NVIDIA NeMo 24.07 to 25.04, fp8, four mixtures among them",
    "nemo_long": "NVIDIA NeMo, Llama 2 7B of 4k to 1M tokens",
    "yafsdp": "YaFSDP's table of PyTorch's FSDP",
    "torchtitan_a100": "torchtitan on A100",
    "fms_fsdp": "fms-fsdp on A100, 400 Gbit/s a node",
}


def locked_sources() -> str:
    """Errors of sources that nothing was fitted to."""
    found = result("source_accuracy")
    now, first, before = (
        found[k] for k in ("locked sources", "locked sources, first opening", "locked sources, third opening")
    )
    rows = [
        [
            name, str(now[k]["count"]), percent(now[k]["mean"]), percent(now[k]["median"]),
            f"{now[k]['covered']:.0f} %", f"{now[k]['half width']:.0f} %", percent(first[k]["mean"]),
            percent(before[k]["mean"]), f"{before[k]['covered']:.0f} %",
        ]
        for k, name in _LOCKED.items()
    ]  # fmt: skip
    return markdown(
        ["locked source, seconds a step", "rows", "mean", "median", "covered", "half width", "mean, first time",
         "mean, third time", "covered, third time"], rows,
    )  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "strategies": strategies,
    "free annotations": free_annotations,
    "schedule gaps": schedule_gaps,
    "pipelines": pipelines,
    "searches": searches,
    "step accuracy": step_accuracy,
    "locked sources": locked_sources,
}


def figures() -> list[str]:
    """The phrases of the page that result files say, as they stand in it."""
    small, large = (result("bytes_vs_peers")[s]["bytes over lower bound"] for s in ("s8", "s16"))

    def both(name: str, digits: int = 2) -> str:
        return ", ".join(f"{one[name]['geomean']:.{digits}f}" for one in (small, large))

    out = [
        "s8 {:.3f}, s16 {:.3f}; portable {:.3f}, {:.3f}".format(
            *(one[k]["geomean"] for k in ("default", "portable") for one in (small, large))
        ),
        f"XLA {both('xla')}; Shardy's pass {both('shardy pass')}; DTensor min-cost x64 {both('dtensor min-cost x64')}",
    ]
    random = result("random_problems")
    out.append(
        f"{random['problems']:,} random problems of a new seed, {random['plans']:,} plans, "
        f"{random['run on the reference']:,} of them run"
    )
    kinds = result("exhaustive")["kinds"]
    even = [kinds["roomy"], kinds["tight"]]
    pairs = sum(k["pairs"] for k in even)
    equal, portable = (sum(k["equal"][c] for k in even) for c in ("default == all", "portable == portable"))
    out.append(f"equal on {equal} of {pairs}; portable {portable}")
    cases = result("planning_cases")["cases"]

    def planning(case: str) -> str:
        found = cases[case]["seconds"]
        return f"{1e3 * found['median']:.2g} ms ({1e3 * found['max']:.0f})"

    out += [f"16 devices {planning('16 devices')}", f"1,024 {planning('1024 devices')}"]
    summary = result("over_bound")["summary"]
    out.append(
        "{:.2f}, {:.2f}; {:.2f}, {:.2f} since exchanges pay".format(
            *(
                summary[f"{t}, {m}, from 64 MB"]["ratio"]
                for t in ("nominal", "dgx-h100")
                for m in ("one mesh", "two meshes")
            )
        )
    )
    stages = result("lab_stages")["ratios"].values()
    out.append(
        "measured {:.2f} and {:.2f}, claimed {:.2f} and {:.2f}".format(
            *(r[k] for k in ("measured", "claimed") for r in stages)
        )
    )
    imported = result("import_time")["seconds"]
    out.append(
        f"{1e3 * imported['bare']['median']:.1f} ms; {1e3 * imported['with its names']['median']:.0f} ms when every"
    )
    gloo = sum(launch["programs"] for launch in result("run_torch")["launches"])
    out.append(f"{gloo:,} on gloo, {result('run_jax')['programs']:,} on JAX, {result('run_mpi')['programs']:,} on MPI")
    for ranks in (4, 8):
        said = result(f"operators_{ranks}")["verdicts"]
        out.append(f"{said['equal']:,} {'cases ' * (ranks == 4)}equal, {said['rounding']} to rounding")
    job = result("live_memory")
    most, got = (
        max(row[what] for row in job["ranks"]) for what in ("share of the certificate", "received of the account")
    )
    out.append(
        f"at most {most:.2f} of a certificate of {job['certificate bytes'] / 2**20:.0f} MiB, bytes a step {got:.4f}"
    )
    live = result("weights_live")["rows"]
    ours, full, broadcast, checkpoint = live
    out += [
        f"{1e3 * ours['median seconds']:.0f} ms; {ours['megabytes beside the parameters']:.1f} MB of staging",
        f"`full_tensor` and slices {full['over refit']:.0f} times, gather and broadcast "
        f"{broadcast['over refit']:.0f} times, torch.distributed.checkpoint in memory "
        f"{checkpoint['over refit']:.1f} times",
    ]
    ties = result("plan_ties")
    out.append(f"of {ties['pairs']:,} | so `plan` calls 5 % a tie")
    fixes = result("megatron_orders")["fixes"]
    out.append(f"{fixes['an order']} orders, {fixes['a rankfile']} rankfiles")
    torch = result("torch_vs_dtensor")["summary"]
    out += [
        "DTensor greedy {}, min-cost {}; with a real all-to-all {}, {}".format(
            *(f"{torch[w]['time / ours, geomean']:.1f} ({torch[w]['max']:.1f})"
              for w in ("greedy", "min-cost", "greedy*", "min-cost*"))
        ),
        f"{torch['ours']['wire / lower bound']:.3f}; portable {torch['portable']['wire / lower bound']:.2f}",
    ]  # fmt: skip
    xla = result("reshard_vs_xla")["xla over ours"]
    out += [
        f"geomean {xla['bytes received']['geomean']:.2f}, {xla['largest array']['geomean']:.2f}; ours never more",
        f"seconds {xla['seconds']['geomean']:.2f}, compilation {xla['compile seconds']['geomean']:.2f}",
    ]
    lab = result("lab_experiments")
    events = lab["scores"]["events, per placement"]
    out.append(f"{100 * events['median_regret']:.2f} %; {100 * events['mean_error']:.1f} %")
    out.append(f"mean absolute error, {lab['pairs']:,} pairs")
    drawn = result("lab_strategies")["scores"]["predicted"]
    out.append(
        f"{drawn['kendall']:.2f}; {drawn['regret percent']:.1f} %; {drawn['mean error percent']:.1f} %, "
        f"{drawn['max error percent']:.1f} %"
    )
    faults, losses = result("weights_faults")["total"], result("weights_losses")["total"]
    out += [f"{faults['faults']} planted faults of twelve kinds", f"{losses['losses']} planted losses of seven kinds"]
    paired = result("weights_pairs")["rows"]
    out.append(
        f"{sum(r['cases'] - r['wrong'] for r in paired):,} of {sum(r['cases'] for r in paired):,} cases of "
        f"{sum(r['pairs'] for r in paired)} pairs equal"
    )
    closed, simulated = result("time_agreement")["agreement"]
    within = "closed within 5 % of ops on {:.1f} %, within 12 % on {:.1f} %; events {:.1f} and {:.1f} %"
    out.append(within.format(*(100 * a[k] for a in (closed, simulated) for k in ("within 5 %", "within 12 %"))))
    step = result("step_accuracy")
    out.append(f"{step['all intervals']['count']} rows held out by a hash of their ids")
    out.append(
        f"hold {step['all intervals']['covered']:.0f} % of all held-out rows, with a half width of "
        f"{step['all intervals']['median half width']:.0f} % in the median"
    )
    for row, said in zip(step["ranks"], ("BLOOM", "vTrain on one node", "on several"), strict=True):
        out.append(
            f"{said} ({row['groups']} groups, {row['rows']} rows) tau {row['tau']:.2f}, regret {row['regret']:.1f} %"
        )
    memory = result("source_accuracy")["locked rows"]["memory"]
    out.append(
        f"Out of memory: {memory['said, percent']:.0f} % said (80 asked), {memory['false alarms, percent']:.1f} % false"
    )
    jobs = result("job_events")
    out.append(f"32 s there) {jobs['gpt3-large forward']['simulate']['median']:.3f}, of 0.05 asked")
    shops = result("schedule_gaps")["summary"]
    out.append(f"{shops['shops']} of 510")
    return out


def written(text: str) -> str:
    """The page with every table as its result files say; raises `KeyError` for a marked table that nothing makes."""
    return _TABLE.sub(lambda m: m["head"] + TABLES[m["name"]]() + m["tail"], text)


def tables_marked(text: str) -> list[str]:
    """The tables that a page has."""
    return [m["name"] for m in _TABLE.finditer(text)]


def missing_figures(text: str) -> list[str]:
    """The phrases of result files that a page lacks, its line breaks put aside."""
    plain = " ".join(text.split())
    return [phrase for phrase in figures() if phrase not in plain]


def main() -> int:
    """Write or check the page; 1 where it is not what the result files say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = PAGE.read_text()
    page = written(text)
    if not options.check:
        PAGE.write_text(page)
    missing = missing_figures(page)
    for phrase in missing:
        print(f"not in {PAGE.relative_to(ROOT)}: {phrase}")
    return int(bool(missing) or (options.check and page != text))


if __name__ == "__main__":
    sys.exit(main())
