"""`read_arguments`: the strategy that a launch's own arguments say, of Megatron-LM or of torchtitan.

Read are options of a command line, from a script or a file of arguments, with a blank or '=' before their value. What
says how ranks share a model becomes fields of a strategy; the others are counted by name, so that none is silent.

Source: NVIDIA/Megatron-LM core 0.16.1 `training/arguments.py`; pytorch/torchtitan 0.3.0 `config/configs.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardplan.errors import ParseError, excerpt
from shardplan.launches.megatron import DEFAULT, MAPPING, MAPPING_OPTION
from shardplan.strategy.held_cuts import deal_experts

_OPTION = re.compile(r"--(?P<name>[A-Za-z][\w.-]*)(?:[=\s]+(?P<value>(?!--)[^\s\\]+))?")
WHOLE = {  # options that are a number, and the field that it is
    "tensor-model-parallel-size": "tensor",
    "pipeline-model-parallel-size": "pipeline",
    "context-parallel-size": "context",
    "expert-model-parallel-size": "expert",
    "micro-batch-size": "microbatch",
    "global-batch-size": "global_batch",
    "num-virtual-stages-per-pipeline-rank": "interleave",
    "parallelism.tensor_parallel_degree": "tensor",
    "parallelism.pipeline_parallel_degree": "pipeline",
    "parallelism.context_parallel_degree": "context",
    "parallelism.expert_parallel_degree": "expert",
    "parallelism.pipeline_parallel_microbatch_size": "microbatch",
    "training.global_batch_size": "global_batch",
}
FLAGS: Mapping[str, Mapping[str, Any]] = {  # options without a value, and what they say
    "sequence-parallel": {"sequence_parallel": True},
    "use-distributed-optimizer": {"zero": 1},
    "recompute-activations": {"recompute": "selective"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "grad-reduce-in-bf16": {"gradient_dtype": "bf16"},
    "tp-comm-overlap": {},
    "overlap-grad-reduce": {},
    "overlap-moe-expert-parallel-comm": {"expert_overlap": True, "schedule": "combined-1f1b"},
    "use-megatron-fsdp": {},
    "parallelism.enable_sequence_parallel": {"sequence_parallel": True},
    "parallelism.no-enable_sequence_parallel": {"sequence_parallel": False},
}
CONTEXTS = {"p2p": "ring", "a2a": "ulysses", "all_gather": "gather"}
SHARDING = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}
SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "loopedbfs": "looped-bfs",
             "zbvzerobubble": "zb-v", "dualpipev": "dualpipev"}  # fmt: skip
WORDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # options of a word, the field, and what each word means
    "cp-comm-type": ("context_kind", CONTEXTS),
    "recompute-granularity": ("recompute", {"full": "full", "selective": "selective"}),
    "data-parallel-sharding-strategy": ("zero", SHARDING),
    "parallelism.pipeline_parallel_schedule": ("schedule", SCHEDULES),
    "training.mixed_precision_param": ("precision", {"bfloat16": "bf16", "float32": "fp32"}),
}
TITAN = "parallelism."
MOST_LAYOUT = 10_000  # letters and bars of a layout of stages, written out


@dataclass(frozen=True, slots=True)
class ReadArguments:
    """What arguments say: fields of a strategy, in which order ranks are numbered, and the options that say neither."""

    fields: Mapping[str, Any]
    order: str  # Megatron's order string, fastest first; torchtitan's mesh is its default
    others: tuple[str, ...]


class _Said(NamedTuple):
    """Options by name, without the dashes, in order."""

    values: Mapping[str, str | None]

    def number(self, name: str) -> int | None:
        """Return the number that an option says; raises `ParseError` where it is none."""
        value = self.values.get(name)
        if name not in self.values:
            return None
        if value is None or re.fullmatch(r"-1|\d{1,9}", value) is None:
            raise ParseError(f"--{name} {excerpt(value or '')}; legal is a whole number")
        return int(value)


def read_arguments(text: str, devices: int, layers: int | None = None) -> ReadArguments:
    r"""Return what the arguments of a launch on so many devices say; `layers` are the model's.

    Raises `ParseError` for an option that is said twice or has a value that it does not take, and where degrees do not
    divide the devices.

    >>> read_arguments("torchrun train.py --tensor-model-parallel-size 8 \\\n --use-distributed-optimizer", 16).fields
    {'tensor': 8, 'zero': 1, 'schedule': '1f1b', 'data': 2}
    """
    values: dict[str, str | None] = {}
    code = "\n".join(row.partition("#")[0] for row in text.splitlines())
    for match in _OPTION.finditer(code):
        name = match["name"] if "." in match["name"] else match["name"].replace("_", "-")
        if name in values and values[name] != match["value"]:
            raise ParseError(f"arguments: --{name} is said twice, as {values[name]} and as {match['value']}")
        values[name] = match["value"]
    said = _Said(values)
    found: dict[str, Any] = {}
    for name, field in WHOLE.items():
        if (number := said.number(name)) is not None:
            if number < 1 and (field, number) != ("global_batch", -1):
                raise ParseError(f"--{name} {number}; legal is at least 1")
            found[field] = number
    for name, fields in FLAGS.items():
        if name in values:
            found |= fields
    for name, (field, words) in WORDS.items():
        if name in values:
            word = (values[name] or "").lower()
            if word not in words:
                raise ParseError(f"--{name} {excerpt(values[name] or '')}; legal are {', '.join(words)}")
            found[field] = words[word]
    known = {*WHOLE, *FLAGS, *WORDS}
    titan = any(name.startswith(TITAN) for name in values)
    for read in (_titan if titan else _megatron, _replicas, _inner_experts if titan else _expert_devices):
        known |= read(said, found, devices, layers)
    order = MAPPING if MAPPING_OPTION[2:] in values else DEFAULT
    return ReadArguments(found, order, tuple(name for name in values if name not in known))


def _megatron(said: _Said, found: dict[str, Any], devices: int, layers: int | None) -> set[str]:
    """Chunks of a rank, and Megatron-FSDP; the options that were looked at."""
    if (each := said.number("num-layers-per-virtual-pipeline-stage")) is not None:
        stages = found.get("pipeline", 1) * each
        if layers is None or not each or layers % stages:
            raise ParseError(
                f"--num-layers-per-virtual-pipeline-stage {each}: {layers or 'unknown'} layers are no whole number of "
                f"chunks on {found.get('pipeline', 1)} ranks"
            )
        found["interleave"] = layers // stages
    layout = "pipeline-model-parallel-layout"
    if (stages_text := said.values.get(layout)) is not None:
        found |= _read_layout(stages_text, found.get("pipeline", 1))
    if found.get("context", 1) > 1:
        found.setdefault("context_kind", CONTEXTS["p2p"])  # Transformer Engine's default
    found.setdefault("schedule", "interleaved" if found.get("interleave", 1) > 1 else "1f1b")
    if found.get("expert_overlap"):
        found.setdefault("interleave", 1)
    if "use-megatron-fsdp" in said.values and found.get("zero") == SHARDING["optim_grads_params"]:
        found["fsdp"] = True
    looked = _block(said, found, layers)
    if (copies := said.number("num-distributed-optimizer-instances")) is not None and copies > 1:
        found["shard"] = -copies  # a number of groups: `_replicas` knows how many each has
    looked |= {"num-layers-per-virtual-pipeline-stage", "num-distributed-optimizer-instances", layout}
    return {*looked, MAPPING_OPTION[2:]}


def _block(said: _Said, found: dict[str, Any], layers: int | None) -> set[str]:
    """Full recomputation by units of one layer, or of the first layers of a stage; of others nothing was looked at."""
    names = {"recompute-method", "recompute-num-layers"}
    method, count = (said.values.get("recompute-method") or "").lower(), said.number("recompute-num-layers")
    if found.get("recompute") != "full" or (method, count or 1) == ("uniform", 1):
        return names if found.get("recompute") == "full" else set()
    if method != "block" or count is None or count < 0:
        return set()
    _of_first_layers(found, count, layers)
    return names


def _of_first_layers(found: dict[str, Any], count: int, layers: int | None) -> None:
    """Say that the first layers of a stage alone are computed again: none of them, some, or all."""
    stages = found.get("pipeline", 1) * found.get("interleave", 1)
    if not count:
        found["recompute"] = "none"
    elif layers is None or count <= layers - stages:  # more no stage can have beside one that is kept
        found["recompute_layers"] = count


def _read_layout(text: str, ranks: int) -> dict[str, Any]:
    r"""Read a layout of stages: E the embedding, t a layer, m one of multi-token prediction, L the loss.

    Stages are between |, and `(..)*n` and `t*n` repeat. Cuts are said where stages differ by more than a layer: else
    they are even.

    >>> _read_layout("'Et|(tt|)*2t,L'", 2)
    {'interleave': 2}
    """
    plain, repeats = re.sub(r"""[\s,'"]""", "", text), 1
    while repeats and len(plain) <= MOST_LAYOUT:  # the innermost first
        plain, repeats = re.subn(
            r"(?:\(([^()]*)\)|([A-Za-z]))\*(\d{1,3})", lambda m: (m[1] or m[2] or "") * int(m[3]), plain
        )
    stages = plain.split("|")
    if len(plain) > MOST_LAYOUT or re.fullmatch(r"[EtmL|]+", plain) is None or len(stages) % ranks:
        raise ParseError(
            f"--pipeline-model-parallel-layout {excerpt(text)}: legal are E, t, m, L and * in stages by |, a whole "
            f"number of them on each of {ranks} ranks, and {MOST_LAYOUT:,} letters in all"
        )
    layers = [stage.count("t") for stage in stages]
    found: dict[str, Any] = {"interleave": len(stages) // ranks} if len(stages) > ranks else {}
    if max(layers) - min(layers) > 1:
        found["cuts"] = tuple(itertools.accumulate(layers[:-1]))
    return found


def _titan(said: _Said, found: dict[str, Any], devices: int, layers: int | None) -> set[str]:
    """Degrees of HSDP, and the microbatch."""
    names = [f"{TITAN}data_parallel_{word}_degree" for word in ("replicate", "shard")]
    copies, shard = (said.number(name) for name in names)
    copies = copies or 1
    inside = _replica_devices(found)
    if shard in (None, -1):
        shard = max(devices // (inside * copies), 1)
    found["data"] = copies * shard
    if shard > 1:
        found["fsdp"] = True
        found["zero"] = 3
        keeps = f"{TITAN}fsdp_reshard_after_forward"
        # The default keeps parameters gathered under pipelining alone.
        how = (said.values.get(keeps) or "default").lower()
        if how == "never" or (how == "default" and found.get("pipeline", 1) > 1):
            found["zero"] = 2
        if copies > 1:
            found["shard"] = shard
    if found.get("tensor", 1) > 1:
        found.setdefault("sequence_parallel", True)  # torchtitan's default
    else:
        found.pop("sequence_parallel", None)
    balancer = f"{TITAN}context_parallel_load_balancer"
    if found.get("context", 1) > 1:
        found["context_kind"] = "zigzag" if said.values.get(balancer) == "headtail" else "gather"
    looked = _checkpoints(said, found, layers)
    local = said.number("training.local_batch_size")
    if local is not None:
        if found.get("pipeline", 1) == 1:
            found["microbatch"] = local
        elif "microbatch" not in found:
            found["microbatch"] = 1
        found.setdefault("global_batch", local * found["data"])
    if found.get("global_batch") == -1:
        found["global_batch"] = (local or 1) * found["data"]
    return {*names, *looked, balancer, f"{TITAN}fsdp_reshard_after_forward", "training.local_batch_size"}


def _checkpoints(said: _Said, found: dict[str, Any], layers: int | None) -> set[str]:
    """Checkpoints of all layers, of ops, or (before torchtitan 0.3) of every so many-th layer: as many, the first."""
    mode, option = (f"activation_checkpoint.{word}" for word in ("mode", "selective_ac_option"))
    how, every = ((said.values.get(name) or "").lower() for name in (mode, option))
    stages = found.get("pipeline", 1) * found.get("interleave", 1)
    if how in ("full", "none"):
        found["recompute"] = how
        return {mode}
    if how == "selective" and every in ("op", "0", "1"):
        found["recompute"] = "selective_op" if every == "op" else "full"
        return {mode, option}
    if how == "selective" and every.isdigit() and layers is not None and layers % stages == 0:
        found["recompute"] = "full"
        _of_first_layers(found, layers // stages // int(every), layers)
        return {mode, option}
    return set()


def _replicas(said: _Said, found: dict[str, Any], devices: int, layers: int | None) -> set[str]:
    """The replicas that are left."""
    inside = _replica_devices(found)
    if "data" not in found:
        if devices % inside:
            raise ParseError(f"arguments: a replica has {inside} devices, which do not divide the {devices} there are")
        found["data"] = devices // inside
    if found.get("shard", 1) < 0:
        found["shard"] = found["data"] // -found["shard"]
    return set()


def _expert_devices(said: _Said, found: dict[str, Any], devices: int, layers: int | None) -> set[str]:
    """Which devices share experts in Megatron: neighbours, of `tensor` too where an expert is on one of them."""
    name, tensor = "expert-tensor-parallel-size", found.get("tensor", 1)
    inside = said.number(name)
    if inside not in (None, 1, tensor):
        return set()
    _take_experts(found, "tensor" if inside == 1 else "context")
    return {name}


def _inner_experts(said: _Said, found: dict[str, Any], devices: int, layers: int | None) -> set[str]:
    """Which devices share experts in torchtitan: the innermost."""
    _take_experts(found, "tensor")
    return set()


def _take_experts(found: dict[str, Any], first: str) -> None:
    """Say whose devices share experts, where it makes them others than by default."""
    sizes = {"data": found.get("shard", found["data"]), "context": found.get("context", 1),
             "tensor": found.get("tensor", 1), "group": 1}  # fmt: skip
    expert = found.get("expert", 1)
    if deal_experts(sizes, expert, first) != deal_experts(sizes, expert, "data"):
        found["expert_from"] = first


def _replica_devices(found: Mapping[str, Any]) -> int:
    """Devices of a replica."""
    return found.get("tensor", 1) * found.get("pipeline", 1) * found.get("context", 1)
