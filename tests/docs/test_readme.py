"""The README's table of predictions beside measurements says what the committed result files say."""

import json
from typing import Any

from tests.docs.test_first_page import ROOT

README = (ROOT / "README.md").read_text()


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_collectives() -> None:
    found = {row["of"]: row for row in result("collectives")["library"]}
    one, several = (found[f"nccl, {place}, held out"] for place in ("one", "several"))
    text = (
        f"| NCCL, curves held out: {one['count']} rows inside a node, {several['count']} between nodes | "
        f"{one['median_error_percent']:.1f} %, {several['median_error_percent']:.1f} % in the median |"
    )
    assert text in README, text


def test_a_step_of_a_team() -> None:
    ran = result("team_plans")["teams"]["llama3-70b, 256 H100"]["as it ran"]
    error = ran["predicted"] / ran["seconds"] - 1
    text = (
        f"| torchtitan's Llama 3 70B on 256 H100, in {ran['precision']}: {ran['seconds']:.1f} s a step | "
        f"{100 * error:.1f} %: {ran['predicted']:.1f} s |"
    )
    assert text in README, text


def test_a_thread_of_memory() -> None:
    rows = result("memory_threads")["rows"]
    failed, ran = (rows[f"threads/bridge3107-{name}"] for name in ("vpp5", "vpp10"))
    assert failed["ran out"] and not ran["ran out"]
    both = f"{failed['certified'] / 1e9:.1f} GB, {ran['certified'] / 1e9:.1f} GB"
    told = "none" if not failed["certified to fit"] and ran["certified to fit"] else "one"
    memory = f"{failed['memory'] / 1e9:.0f} GB"
    text = (
        f"| Megatron-Bridge 3107, 70B on 32 H100 of {memory}: ran out with 5 chunks a stage, ran with 10 | "
        f"{told}: {both} |"
    )
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
