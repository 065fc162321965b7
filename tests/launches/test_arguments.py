"""Arguments of launches: what `plan --out` writes for Megatron and torchtitan comes back as the strategy it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardplan import ParseError, Strategy, Topology
from shardplan.launches.arguments import read_arguments
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.launches.handover.megatron import write_megatron
from shardplan.launches.handover.torchtitan import write_torchtitan
from shardplan.strategy.strategy_text import parse_strategy

SIZES = {"layers": 8, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "seq": 8, "vocab": 32}
BOX = Topology.load("dgx-h100", nodes=4)


def handed(text: str, order: tuple[str, ...] = ("pipeline", "data", "context", "tensor")) -> HandedPlan:
    return HandedPlan("tiny", "llama", SIZES, BOX, parse_strategy(text, BOX.size, global_batch=64), order)


@pytest.mark.parametrize(
    "text",
    ["tp=2 pp=2 vpp=2 sp zero=1 precision=bf16", "tp=4 cp=2 context_kind=ring recompute=full precision=bf16",
     "dp=32 zero=1 shard=8", "fsdp zero=3 tp=2 precision=bf16", "mbs=2 tp=2 recompute=selective",
     "tp=2 recompute=full recompute_layers=3 precision=bf16", "pp=2 vpp=2 recompute=full recompute_layers=1"],
)  # fmt: skip
def test_megatrons_arguments_come_back(text: str) -> None:
    made = write_megatron(handed(text))
    read = read_arguments(made.files["arguments.txt"], BOX.size, SIZES["layers"])
    assert Strategy(**read.fields) == made.runs and read.order == "tp-cp-ep-dp-pp"
    assert "num-layers" in read.others and not any("parallel" in name for name in read.others)


MIXTURE = {**SIZES, "experts": 16, "experts_per_token": 2, "dense_layers": 0}


@pytest.mark.parametrize(
    ("text", "wants", "lacks"),
    [("tp=2 ep=8 expert_from=tensor dispatch=levels", "parallel-size 1\n--moe-token-dispatcher-type flex",
      "groups are others"),
     ("tp=2 cp=2 context_kind=ring ep=4 expert_from=context", "--expert-tensor-parallel-size 2", "a part of tensor"),
     ("tp=4 ep=2 expert_from=tensor", "a part of tensor=4", "--expert-tensor-parallel-size"),
     ("tp=2 ep=8 expert_products=loop", "groups are others", "--moe-grouped")],
)  # fmt: skip
def test_experts_of_megatron_are_on_neighbours(text: str, wants: str, lacks: str) -> None:
    plan = HandedPlan("tiny", "moe", MIXTURE, BOX, parse_strategy(text, BOX.size, global_batch=64))
    made = write_megatron(plan)
    written = made.files["arguments.txt"]
    said = " ".join(made.lines) + written
    assert wants in said and lacks not in said
    read = Strategy(**read_arguments(written, BOX.size, SIZES["layers"]).fields)
    if "--expert-tensor-parallel-size" in written and "tensor=4" not in wants:
        assert read == replace(made.runs, dispatch=None, expert_products=None)


@pytest.mark.parametrize(
    ("text", "runs", "line"),
    [("ep=8 pp=2 vpp=2 schedule=combined-1f1b", {}, None),
     ("ep=8 vpp=1 schedule=combined-1f1b dispatch=levels", {}, None),
     ("ep=8 pp=2 schedule=dualpipev", {"schedule": "combined-1f1b", "interleave": 2},
      "schedule=dualpipev; it runs as combined-1f1b"),
     ("ep=8 pp=4 vpp=1 schedule=combined-1f1b", {"expert_overlap": False, "schedule": "1f1b"},
      "expert_overlap=True with interleave=1 of 4 stages, which it refuses"),
     ("ep=8 pp=2 vpp=2 schedule=combined-1f1b recompute=full", {"expert_overlap": False, "schedule": "interleaved"},
      "expert_overlap=True with recompute=full, which it refuses")],
)  # fmt: skip
def test_exchanges_beside_another_microbatch(text: str, runs: dict[str, object], line: str | None) -> None:
    """Megatron has an option for it, with chunks where there are stages; torchtitan says that it has none."""
    strategy = parse_strategy(text + " expert_overlap=true", BOX.size, global_batch=128)
    plan = HandedPlan("tiny", "moe", MIXTURE, BOX, strategy)
    made, titan = write_megatron(plan), write_torchtitan(plan)
    assert made.runs == replace(strategy, **runs) and (line is None or line in made.lines)
    written = made.files["arguments.txt"]
    overlaps = made.runs.software.expert_overlap
    assert ("--overlap-moe-expert-parallel-comm" in written.split()) == overlaps
    assert not overlaps or "--moe-token-dispatcher-type" in written.split()
    read = Strategy(**read_arguments(written, BOX.size, SIZES["layers"]).fields)
    assert read == replace(made.runs, dispatch=None)
    assert "expert_overlap=True" in titan.lines and not titan.runs.software.expert_overlap


@pytest.mark.parametrize(
    ("text", "want"),
    [("--tensor-model-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1", "tensor"),
     ("--tensor-model-parallel-size 2 --expert-model-parallel-size 8", "data"),
     ("--context-parallel-size 2 --expert-model-parallel-size 8", "context"),
     ("--parallelism.tensor_parallel_degree 2 --parallelism.expert_parallel_degree 8", "tensor"),
     ("--tensor-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size 2", "data")],
)  # fmt: skip
def test_whose_devices_share_experts(text: str, want: str) -> None:
    """Megatron folds experts over context and data, over tensor too where an expert is whole; torchtitan innermost."""
    read = read_arguments(text, 32, 8)
    assert Strategy(**read.fields).expert_from == want
    assert read.others == (("expert-tensor-parallel-size",) if text.endswith("size 2") else ())


@pytest.mark.parametrize(
    "text", ["fsdp zero=3 tp=2 sp precision=bf16", "fsdp zero=3 shard=8 mbs=2 tp=1 sp precision=bf16",
             "fsdp zero=2 pp=2 tp=2 sp precision=bf16", "fsdp zero=3 dp=8 cp=4 context_kind=gather sp precision=fp32"]
)  # fmt: skip
def test_torchtitans_overrides_come_back(text: str) -> None:
    made = write_torchtitan(handed(text))
    read = read_arguments(made.files["overrides.txt"], BOX.size)
    ours = {k: getattr(made.runs, k) for k in ("data", "tensor", "pipeline", "context", "microbatch", "global_batch",
                                               "zero", "fsdp", "shard", "precision")}  # fmt: skip
    again = Strategy(**read.fields)
    assert {k: getattr(again, k) for k in ours} == ours


def test_torchtitans_default_keeps_parameters_under_pipelining() -> None:
    """`fsdp_reshard_after_forward = "default"`: parameters stay gathered under pipelining, and only there."""
    text = "--parallelism.data_parallel_shard_degree=-1 --parallelism.pipeline_parallel_degree={}"
    assert [read_arguments(text.format(pp), 8).fields["zero"] for pp in (1, 2)] == [3, 2]


def test_a_script_of_megatron() -> None:
    text = """
    # --tensor-model-parallel-size 2 is what it was
    torchrun --nproc-per-node 8 pretrain_gpt.py \\
      --tensor_model_parallel_size=8 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping \\
      --lr 1e-4 --sequence-parallel --bf16
    """
    read = read_arguments(text, 32)
    assert read.fields == {"tensor": 8, "pipeline": 2, "sequence_parallel": True, "precision": "bf16",
                           "schedule": "1f1b", "data": 2}  # fmt: skip
    assert read.order == "tp-cp-ep-pp-dp" and read.others == ("nproc-per-node", "lr")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--tensor-model-parallel-size eight", "--tensor-model-parallel-size 'eight'; legal is a whole number"),
        ("--tensor-model-parallel-size 8 --tensor-model-parallel-size 4",
         "arguments: --tensor-model-parallel-size is said twice, as 8 and as 4"),
        ("--tensor-model-parallel-size 3", "arguments: a replica has 3 devices, which do not divide the 32 there are"),
        ("--cp-comm-type ring", "--cp-comm-type 'ring'; legal are p2p, a2a, all_gather"),
        ("--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2",
         "--num-layers-per-virtual-pipeline-stage 3: 8 layers are no whole number of chunks on 2 ranks"),
    ],
)  # fmt: skip
def test_errors(text: str, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        read_arguments(text, 32, 8)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "want", "others"),
    [
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", ("full", 3), ()),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ("full", None), ()),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", ("none", None), ()),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 8", ("full", None), ()),
        # Units of several layers keep the input of the first alone: nothing that a strategy says.
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", ("full", None),
         ("recompute-method", "recompute-num-layers")),
        ("--parallelism.data_parallel_shard_degree 4 --activation_checkpoint.mode full", ("full", None), ()),
        ("--parallelism.data_parallel_shard_degree 4 --activation_checkpoint.mode selective "
         "--activation_checkpoint.selective_ac_option op", ("selective_op", None), ()),
        ("--parallelism.data_parallel_shard_degree 4 --activation_checkpoint.mode selective "
         "--activation_checkpoint.selective_ac_option 2", ("full", 4), ()),
        ("--parallelism.pipeline_parallel_degree 2 --activation_checkpoint.mode selective "
         "--activation_checkpoint.selective_ac_option 3", ("full", 1), ()),
    ],
)  # fmt: skip
def test_layers_that_are_computed_again(text: str, want: tuple[str, int | None], others: tuple[str, ...]) -> None:
    read = read_arguments(text, 4, 8)
    again = Strategy(**read.fields)
    assert ((again.recompute, again.recompute_layers), read.others) == (want, others)
