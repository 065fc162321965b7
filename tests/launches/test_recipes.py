"""Twenty recipes that teams published: read from their launch's arguments, judged, and written as the same again.

Sources: NVIDIA-NeMo/Megatron-Bridge 067f987, docs/performance-summary.md; pytorch/torchtitan, reports of 2024-12 and
2025-06 (b5bcd76); Megatron-LM's own options (core 0.16.1), torchtitan's of 0.3.0.
"""

import re
from dataclasses import replace
from typing import NamedTuple

import pytest

import shardplan as sp
from shardplan.errors import ParseError
from shardplan.launches.arguments import read_arguments
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.launches.handover.megatron import write_megatron
from shardplan.launches.handover.torchtitan import write_torchtitan


class Recipe(NamedTuple):
    """A recipe: what is trained, on so many nodes of a preset, and the arguments of its launch."""

    model: str
    on: str
    sizes: tuple[int, int]  # nodes, and devices of each
    arguments: str


def megatron(tp: int, pp: int, mb: int, gb: int, *, cp: int = 1, ep: int = 1, vpp: int = 1) -> str:
    """Megatron's arguments by the degrees of a row of Megatron-Bridge's table."""
    said = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --context-parallel-size {cp}"
    said += f" --expert-model-parallel-size {ep} --micro-batch-size {mb} --global-batch-size {gb} --bf16"
    said += f" --num-virtual-stages-per-pipeline-rank {vpp}" * (vpp > 1) + " --sequence-parallel" * (tp > 1)
    return said + " --use-distributed-optimizer --overlap-grad-reduce"


def torchtitan(tp: int, pp: int, local: int, gb: int, more: str = "") -> str:
    """torchtitan's overrides by the degrees of a row of its reports."""
    said = f"--parallelism.data_parallel_shard_degree=-1 --parallelism.tensor_parallel_degree={tp}"
    said += f" --parallelism.pipeline_parallel_degree={pp} --training.local_batch_size={local}"
    return f"{said} --training.global_batch_size={gb} --training.mixed_precision_param=bfloat16 {more}"


RECIPES = [
    Recipe("llama3-8b", "grand-teton-h100", (1, 8), torchtitan(1, 1, 2, 16)),
    Recipe("llama3-8b", "grand-teton-h100", (16, 8), torchtitan(1, 1, 2, 256)),
    Recipe("llama3-8b", "grand-teton-h100", (8, 8), torchtitan(8, 1, 12, 96)),
    Recipe("llama3-70b", "grand-teton-h100", (32, 8), torchtitan(8, 1, 16, 512)),
    Recipe(
        "llama3-405b",
        "grand-teton-h100",
        (64, 8),
        torchtitan(8, 8, 32, 256, "--parallelism.pipeline_parallel_schedule=1F1B"),
    ),
    Recipe("llama3-8b", "dgx-b200", (1, 8), megatron(1, 1, 2, 128)),
    Recipe("llama3-70b", "dgx-h100", (8, 8), megatron(4, 8, 1, 256, vpp=5)),
    Recipe("llama3-70b", "gb300-nvl72", (1, 64), megatron(1, 4, 1, 256, vpp=5)),
    Recipe("llama3-70b", "gb200-nvl72", (1, 64), megatron(2, 4, 1, 256, vpp=5)),
    Recipe("llama3-405b", "dgx-h100", (128, 8), megatron(8, 8, 1, 512, cp=2, vpp=8)),
    Recipe("llama3-405b", "gb300-nvl72", (4, 64), megatron(4, 8, 1, 1536, vpp=4)),
    Recipe("llama3-405b", "gb200-nvl72", (4, 64), megatron(4, 16, 1, 1536, vpp=4)),
    Recipe("qwen3-30b-a3b", "gb300-nvl72", (1, 8), megatron(1, 1, 8, 512, ep=8)),
    Recipe("qwen3-30b-a3b", "dgx-b200", (1, 8), megatron(1, 1, 1, 512, ep=8)),
    Recipe("qwen3-235b-a22b", "dgx-b200", (32, 8), megatron(1, 8, 1, 8192, ep=8)),
    Recipe("qwen3-235b-a22b", "dgx-h100", (32, 8), megatron(2, 8, 1, 2048, ep=32, vpp=4)),
    Recipe("deepseek-v3", "dgx-h100", (128, 8), megatron(2, 8, 1, 8192, ep=64, vpp=4)),
    Recipe("deepseek-v3", "dgx-b200", (32, 8), megatron(1, 8, 1, 4096, ep=32, vpp=2)),
    Recipe("deepseek-v3", "gb300-nvl72", (4, 64), megatron(1, 2, 1, 4096, ep=32, vpp=8)),
    Recipe("mixtral-8x7b", "dgx-h100", (8, 8), megatron(1, 4, 1, 256, ep=8, vpp=8)),
]


def named(recipe: Recipe) -> str:
    """What a test calls it."""
    return f"{recipe.model} on {recipe.sizes[0]} x {recipe.sizes[1]} {recipe.on}"


def test_there_are_twenty() -> None:
    assert len(RECIPES) == 20 == len(set(RECIPES))


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_a_recipe_comes_out_as_it_went_in(recipe: Recipe) -> None:
    topology = sp.Topology.load(recipe.on, nodes=recipe.sizes[0], gpus=recipe.sizes[1])
    model = sp.Model.load(recipe.model)
    read = read_arguments(recipe.arguments, topology.size, model.fields["layers"])
    strategy = sp.Strategy(**read.fields)
    seconds = sp.simulate(model, strategy, topology, "closed").seconds
    assert 0.05 < seconds < 600
    plan = HandedPlan(recipe.model, recipe.model, {}, topology, strategy)
    titan = "--parallelism." in recipe.arguments
    written = (write_torchtitan if titan else write_megatron)(plan)
    again = read_arguments(
        written.files["overrides.txt" if titan else "arguments.txt"], topology.size, model.fields["layers"]
    )
    # A layout says the stages of layers that no degree divides.
    assert replace(sp.Strategy(**again.fields), cuts=strategy.cuts) == strategy
    if not titan:  # degrees in Megatron's own words
        sizes = re.compile(r"--((?:tensor|pipeline|context|expert-model)-\S*size|[a-z]+-batch-size) (\d+)")
        said, back = (dict(sizes.findall(text)) for text in (recipe.arguments, written.files["arguments.txt"]))
        assert said == back


def test_defaults_of_frameworks_are_read() -> None:
    """Sequences are cut with tensors in torchtitan unless told otherwise; Megatron's contexts are rings."""
    titan = read_arguments(torchtitan(8, 1, 2, 16), 8).fields
    assert titan["sequence_parallel"] is True
    assert not read_arguments(torchtitan(8, 1, 2, 16, "--parallelism.no-enable_sequence_parallel"), 8).fields[
        "sequence_parallel"
    ]
    assert read_arguments(megatron(1, 1, 1, 16, cp=2), 8).fields["context_kind"] == "ring"


def test_layouts_of_stages_are_read() -> None:
    """Of DeepSeek-V3, 61 layers and one of multi-token prediction on 16 ranks of 2 chunks."""
    said = "--pipeline-model-parallel-size 16 --pipeline-model-parallel-layout 'Et*3|(tt|)*29m|L'"
    found = read_arguments(said, 64).fields
    assert found["interleave"] == 2 and found["schedule"] == "interleaved"
    assert found["cuts"] == (3, *range(5, 62, 2), 61)
    with pytest.raises(ParseError, match="a whole number of them on each of 16 ranks"):
        read_arguments(said.replace("*29m", "*28m"), 64)
    with pytest.raises(ParseError, match="and 10,000 letters in all"):
        read_arguments(said.replace("t*3", "(((t)*999)*999)*999"), 64)


@pytest.mark.parametrize("name", ["tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size"])
def test_a_degree_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ParseError, match=f"--{name} 0; legal is at least 1"):
        read_arguments(f"--{name} 0", 8)
