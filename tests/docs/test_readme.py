"""The README's table of predictions beside measurements says what the committed result files say."""

import json
from typing import Any

from tests.docs.test_first_page import ROOT

README = (ROOT / "README.md").read_text()


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_collectives() -> None:
    found = {row["of"]: row for row in result("collectives")["library"]}
    for place, words in (("one", "inside a node"), ("several", "between nodes")):
        row = found[f"nccl, {place}, held out"]
        error = row["median_error_percent"]
        text = f"| NCCL {words}, {row['count']} rows of curves held out | {error:.1f} % in the median |"
        assert text in README, text


def test_steps() -> None:
    found = {row["source"]: row for row in result("step_accuracy")["errors"] if row["quantity"] == "seconds_per_step"}
    for source, words in (("llm_foundry", "llm-foundry"), ("vtrain_single", "vTrain on one node")):
        row = found[source]
        text = f"| steps of training, {words}, {row['count']} rows held out | {row['mean']:.1f} % in the mean |"
        assert text in README, text


def test_lab() -> None:
    lab = result("lab_experiments")
    score = lab["scores"]["events, per placement"]
    text = (
        f"| the lab, {lab['pairs']:,} programs on emulated links | {score['mean_error']:.1%} in the mean; the "
        f"predicted best is {score['median_regret']:.1%} slower than the best, in the median |"
    ).replace("%", " %")
    assert text in README, text
