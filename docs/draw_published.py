"""Draw what each of the four papers publishes beside ours, from the committed result files, into `docs/pictures`.

    python docs/draw_published.py

A row is a figure, with a bar for theirs and one for ours on a scale of the row's own. Of DistIR, which publishes no
table that is worked out here, theirs is its simulator as it is reproduced.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardplan.report.canvas import FAINT, INK, Canvas

HERE = Path(__file__).parent
RESULTS, PICTURES = HERE.parent / "benchmarks" / "results", HERE / "pictures"
WIDTH, LEFT, BARS, ROW, TOP = 720, 250, 330, 46, 56
THEIRS, OURS = "#b0bac5", "#0072b2"


class Figure(NamedTuple):
    """A figure of a paper, and ours, in one unit."""

    name: str
    theirs: float
    ours: float
    form: str  # how both are written: `{:.2f} x`


def result(name: str) -> dict[str, Any]:
    """Return a committed result file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def list_figures() -> Mapping[str, tuple[str, str, list[Figure]]]:
    """Return by paper what stands above the picture, whose the grey bars are, and the figures."""
    found = result("placement_set")
    said, ring = (
        found["published"],
        next(r for r in found["sets"]["437"] if (r["algorithm"], r["system"]) == ("ring", "all")),
    )
    reductions = [
        Figure("programs that gain, of all", 100 * said["improved"], 100 * ring["of all"], "{:.0f} %"),
        Figure("mean gain", said["mean gain"], ring["mean"], "{:.2f} x"),
        Figure("largest gain", said["largest gain"], ring["max"], "{:.2f} x"),
        Figure("slowest placement over fastest", said["placement ratio"], ring["placement ratio"], "{:.0f} x"),
    ]
    lab = result("lab_redistribution")
    said, seconds = lab["published"], lab["default"]["all"]["measured seconds"]
    moves = [
        Figure("XLA's seconds over ours, geomean", said["geomean"], seconds["geomean"], "{:.2f} x"),
        Figure("the same, at most", said["max"], seconds["max"], "{:.1f} x"),
    ]
    grids = result("distir_grids")
    searches = [
        Figure(words, grids["rankings"][key]["parity seconds"], grids[key]["seconds"], "{:.1f} s")
        for key, words in (("gpt", "GPT, 1,755 forward passes"), ("mlp", "MLP, 1,263 training steps"))
    ]
    gains = result("fused_grid")["summary"]["fusion gain, communication-heavy (asked 0.75)"]
    steps = result("fused_dlrm")["steps"]
    best = max(steps, key=lambda s: s["reduction"])
    fused = [
        *(Figure(f"{name}, less time in a node", theirs, 100 * (1 - gains[name]), "{:.1f} %")
          for name, theirs in (("gemv", 22.0), ("gemm", 20.0), ("embedding", 20.0))),
        Figure("a step of a DLRM, 128 nodes", 100 * best["published"], 100 * best["reduction"],
               "{:.1f} %"),
    ]  # fmt: skip
    return {
        "2110.10548": ("Reductions: published (measured), ours (simulated, ring, 437 cases)", "published", reductions),
        "2112.01075": (
            f"Redistribution: published, ours (measured in the lab, {seconds['count']} problems)",
            "published",
            moves,
        ),
        "2111.05426": (
            "DistIR's grids, processor seconds: its simulator as reproduced here, ours",
            "DistIR, reproduced",
            searches,
        ),
        "2305.06942": ("Fused: published, up to; ours on two processes of a CPU, and simulated", "published", fused),
    }


def draw_figures(title: str, theirs: str, figures: list[Figure]) -> str:
    """Return the picture of a paper."""
    canvas = Canvas()
    canvas.text(16, 24, title, size=14, weight=600)
    for k, (fill, words) in enumerate(((THEIRS, theirs), (OURS, "ours"))):
        canvas.rect(LEFT + 150 * k, 34, 10, 10, fill)
        canvas.text(LEFT + 150 * k + 16, 43, words, size=11, fill=FAINT)
    for k, one in enumerate(figures):
        y = TOP + k * ROW
        canvas.text(LEFT - 12, y + 23, one.name, size=12, anchor="end")
        most = max(one.theirs, one.ours)
        for place, (value, fill) in enumerate(((one.theirs, THEIRS), (one.ours, OURS))):
            wide = max(BARS * value / most, 1.5)
            canvas.rect(LEFT, y + 4 + 17 * place, wide, 14, fill)
            canvas.text(LEFT + wide + 6, y + 15 + 17 * place, one.form.format(value), size=11, fill=INK)
    return canvas.document(WIDTH, TOP + ROW * len(figures) + 8, title)


def main() -> None:
    """Write the pictures."""
    PICTURES.mkdir(exist_ok=True)
    for paper, (title, theirs, figures) in list_figures().items():
        path = PICTURES / f"published-{paper}.svg"
        path.write_text(draw_figures(title, theirs, figures), encoding="utf-8")
        print(path.relative_to(HERE.parent))


if __name__ == "__main__":
    main()
