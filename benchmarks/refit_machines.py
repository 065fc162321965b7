"""All shipped machine files fitted anew, in one call: `python -m benchmarks.refit_machines ROWS... --out FOLDER`.

Machines are fitted together, those with one chip drawn to each other. No efficiency is above 1, attention by any class
of kernels included; and no two machines with a chip differ by more than 15 % in what is the chip's, but where `--apart`
says why: that reason then stands in the file. Errors on groups that were held out are of a second fit, without them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from benchmarks.common import table
from benchmarks.source_accuracy import fewer

from shardplan.hardware.topology import Topology
from shardplan.simulation.accuracy.calibration import ALIKE, fit_machines
from shardplan.simulation.accuracy.metrics import errors
from shardplan.simulation.accuracy.step_fitting import Bench, held_out, usable
from shardplan.simulation.accuracy.step_rows import StepRow, read_steps
from shardplan.simulation.closed.kernel_classes import with_kernels
from shardplan.simulation.closed.machines import MachineFit, fit_text

Reasons = Mapping[tuple[str, str], str]


def efficiencies(name: str, fit: MachineFit, rows: Sequence[StepRow]) -> dict[str, float]:
    """What kernels reach of a machine's rates, attention by each class that its rows have."""
    device, p = Topology.load(name).device, fit.parameters
    classes = {row.strategy.attention or "flash2" for row in rows} - {"unfused"}
    found = {f"attention, {one}": with_kernels(device, p, one).kernels.attention for one in sorted(classes)}
    return {"product": p.product, "stream": p.stream, "network": p.network, **found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refit_machines", description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+", metavar="ROWS", help="files of measured steps, JSON lines")
    parser.add_argument("--apart", action="append", default=[], metavar="MACHINE.PARAMETER=WHY",
                        help="what may differ from other machines with the chip, and why")  # fmt: skip
    parser.add_argument("--most", type=int, default=130, help="rows of a table, chosen by a hash (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the groups that are held out (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the files")
    options = parser.parse_args()
    apart: dict[tuple[str, str], str] = {}
    for text in options.apart:
        (machine, _, parameter), why = text.partition("=")[0].rpartition("."), text.partition("=")[2]
        if parameter not in ALIKE or not why:
            parser.error(f"--apart {text}: legal is MACHINE.PARAMETER=WHY, of {', '.join(ALIKE)}")
        apart[machine, parameter] = why
    rows = fewer([row for path in options.rows for row in read_steps(path) if usable(row)], options.most)
    judged = fit_machines([row for row in rows if not held_out(row, options.seed)], (), apart)
    lines: list[list[object]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for name, fit in sorted(fit_machines(rows, (), apart).items()):
        mine = [row for row in rows if row.cluster.preset == name]
        held = [row for row in mine if held_out(row, options.seed)]
        reached = efficiencies(name, fit, mine)
        if above := {what: x for what, x in reached.items() if x > 1}:
            raise SystemExit(f"{name}: an efficiency above 1: {above}")
        bench = Bench(mine)
        logs = np.log(bench.seconds(fit.parameters) / bench.measured)
        notes: dict[str, object] = {"rows": len(mine), "held_out": len(held), "seed": options.seed,
                                    "residual": round(float(np.sqrt((logs**2).mean())), 4)}  # fmt: skip
        found: dict[str, float] = {}
        if held and name in judged:
            bench = Bench(held)
            found = errors(bench.seconds(judged[name].parameters), bench.measured)
            for what in ("mean", "median"):
                notes[f"held_out_{what}_error_percent"] = round(found[f"{what}_error_percent"], 2)
        notes |= {f"{parameter}_differs": why for (machine, parameter), why in apart.items() if machine == name}
        source = "steps of " + ", ".join(sorted({row.table for row in mine}))
        (options.out / f"{name}.toml").write_text(fit_text(name, source, fit, notes))
        lines.append([name, len(mine), *(round(x, 3) for x in list(reached.values())[:3]),
                      " ".join(f"{k[11:]} {v:.2f}" for k, v in reached.items() if k.startswith("attention")),
                      notes["residual"], notes.get("held_out_mean_error_percent", "")])  # fmt: skip
    columns = ["machine", "rows", "product", "stream", "network", "attention", "residual", "held out, mean %"]
    print(table(columns, lines, "machines"))


if __name__ == "__main__":
    main()
