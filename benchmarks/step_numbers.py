"""Every number in the cost of a step that is no vendor's figure, with its origin; values are read from the code."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from shardplan.hardware.prices import kernels
from shardplan.simulation.accuracy import forecast
from shardplan.simulation.closed import (
    chips,
    element_bytes,
    kernel_classes,
    memory,
    move_prices,
    numbers,
    part_seconds,
    pass_overlap,
    stages,
)
from shardplan.simulation.closed.machines import machine_fit, shipped
from shardplan.simulation.closed.parameters import Parameters

# By module: each number, what it is, and where it comes from.
TABLE: Mapping[ModuleType, Mapping[str, tuple[str, str]]] = {
    move_prices: {
        "SUM_BYTES": (
            "bytes of an element of cotangents that go round",
            "counted: sums in f32",
        ),
    },
    numbers: {
        "SCORE_BYTES": ("bytes streamed for a score of unfused attention", "counted: arXiv 2205.05198, 4.1"),
        "LOSS_BYTES": ("bytes streamed for a logit", "counted: Megatron's loss, PyTorch's loss"),
        "ALIGNED": ("bytes that rows of a head are multiples of, for tensor cores", "published: cuBLAS"),
        "BLOCK": ("heads and sequences in a block of the fused softmax", "counted: Megatron's fused_softmax.py"),
        "APART": ("kernels, and bytes a score, of a softmax in steps", "counted: Megatron's fused_softmax.py"),
        "IN_STEPS": ("kernels of unfused attention", "counted: its products, softmax, dropout"),
    },
    kernel_classes: {
        "FASTER": ("speed of attention kernels beside flash1", "published: arXiv 2307.08691"),
        "BESIDE": (
            "the same of kernels for asynchronous tensor cores",
            "arXiv 2407.08608; benchmarks/results/gpu.json",
        ),
        "QUERIES": ("queries of a block of attention", "kernels of cuDNN by shape: benchmarks/kernel_shapes.py"),
        "NARROW_BYTES": ("bytes of an element of narrow products", "published: OCP MX 1.0, NVFP4"),
    },
    pass_overlap: {
        "CHANNELS": ("processors that a collective keeps", "published: NCCL's logs, NVIDIA/nccl-tests issue 100"),
    },
    stages: {
        "IN_STEPS": ("bytes of an element that Adafactor's kernels stream", "counted: its kernels one by one"),
        "_PASSES": ("times the update passes over the state", "counted: arXiv 1412.6980"),
    },
    part_seconds: {
        "EXPOSED": ("part of an overlapped movement that is exposed", "counted: four parts, the first alone"),
    },
    element_bytes: {
        "MASTER_BYTES": ("of a parameter that the optimizer updates without a copy", "definition"),
        "_RECIPES": ("bytes of parameter, gradient and state by precision", "counted: software's documentation"),
        "_MOMENTS": ("bytes of state that Adafactor's rows and columns take the place of", "definition"),
        "_SIZES": ("bytes of a gradient by dtype", "definition"),
    },
    memory: {},
    kernels: {
        "HEAD": ("width of a head at which shares are stated", "definition"),
        "EXPONENTIALS": ("exponentials of a processor a second", "published: CUDA programming guide"),
        "ENDS": ("of the longest block, for which processors wait at the end", "fitted: benchmarks/kernel_shapes.py"),
        "BACKWARD": ("speed of attention's backward pass", "fitted: benchmarks/kernel_shapes.py"),
        "KEYS": ("keys of a block of the backward pass", "published: FlashAttention's tiles"),
    },
    chips: {
        "KNOWN": ("deviations of what kernels say of a chip", "by hand: spread of kernels, and of fits beside them"),
        "APART": ("deviations of machines with one chip", "by hand: spread of the fits"),
        "UNKNOWN": ("times KNOWN, of a chip without tables", "by hand"),
        "NEAR": ("times a peak that is the same chip's", "definition"),
    },
    forecast: {
        "APART": ("as of chips", "by hand: spread of the fits"),
        "OPEN": ("deviations of the logarithms of `half` and `order`", "by hand, with held-out coverage in view"),
        "RESIDUAL": ("spread of the logarithm of seconds that no parameter explains", "residuals of the fits"),
        "MIXTURE": (
            "deviation that no parameter explains, of mixtures of experts",
            "sources left out, one after another",
        ),
        "NARROW_OPEN": ("the same, of narrow products", "sources left out, one after another"),
        "ASSUMED": ("the same, where a row's source leaves fields open", "sources left out, one after another"),
        "MEMORY_RESIDUAL": ("part by which bytes may be below what was predicted", "residuals of bytes"),
    },
}
# Numbers that stand in formulas, or in the presets of topologies.
WRITTEN_OUT = (
    ("products repeated", "simulation.closed.part_seconds", 0.5, "part of a layer repeated by torchtitan's policy",
     "published: every second product"),
    ("logit", "strategy.runtimes", "4 and 8", "bytes of a logit at the loss, beside the logits",
     "counted: Megatron's loss, PyTorch's loss"),
    ("score, mask", "strategy.runtimes", "5 and 2", "bytes kept of a score, and of masks of dropout, unfused",
     "counted: arXiv 2205.05198, 4.1"),
    ("layers", "strategy.runtimes", 2, "layers whose gathered parameters are there at once", "counted: one ahead"),
    ("efficiency", "hardware presets, levels", "0.88 to 0.93", "part of a link's bandwidth that arrives",
     "fitted to collectives, not to steps"),
)  # fmt: skip
FITTED = ("product", "stream", "launch", "eager", "network", "attention")
BY_HAND = {
    "half": "one for all machines, by hand; products alone say 86 to 150",
    "order": "one for all machines, chosen with rows in view",
    "context": "by hand, fitted to all rows that count bytes",
    "fragmentation": "by hand, fitted to all rows that count bytes",
}


def number_table() -> list[dict[str, Any]]:
    """Return a row for each number: its name, value or how many values, what it is, its origin."""
    rows: list[dict[str, Any]] = [
        {"name": name, "where": f"machine, {len(shipped())} files", "value": None, "what": "see Parameters",
         "origin": "fitted to rows of the machine"}
        for name in FITTED
    ]  # fmt: skip
    plain = Parameters()
    for name, origin in BY_HAND.items():
        values = {m: getattr(machine_fit(m).parameters, name) for m in shipped()}
        own = {m: v for m, v in values.items() if v != getattr(plain, name)}
        rows.append({"name": name, "where": "machine", "value": own or getattr(plain, name), "what": "see Parameters",
                     "origin": origin})  # fmt: skip
    for module, named in TABLE.items():
        for name, (what, origin) in named.items():
            rows.append({"name": name, "where": module.__name__.removeprefix("shardplan."), "value":
                         _plain(getattr(module, name)), "what": what, "origin": origin})  # fmt: skip
    rows += [
        {"name": name, "where": where, "value": value, "what": what, "origin": origin}
        for name, where, value, what, origin in WRITTEN_OUT
    ]
    return rows


def unlisted() -> list[str]:
    """Return the names of numbers that modules have and the table has not."""
    found: list[str] = []
    for module, named in TABLE.items():
        for name, value in vars(module).items():
            word = name.lstrip("_")
            if word.isupper() and _numeric(value) and name not in named and word not in PLAIN:
                found.append(f"{module.__name__}.{name}")
    return found


# Numbers of no physics: places in tuples, phases, a step of a derivative, a quantile; and what other modules own.
PLAIN = (
    "FORWARD",
    "BACKWARD",
    "FULL",
    "SELECTIVE",
    "SELECTIVE_OP",
    "FLASH1",
    "UNFUSED",
    "LOSS",
    "NORMAL_90",
    "STEP",
    "ITEMSIZE",
    "PHASES",
    "CODES",
)


def _numeric(value: object) -> bool:
    if isinstance(value, (int, float)):
        return True
    if isinstance(value, Mapping):
        return any(_numeric(x) for x in value.values())  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return isinstance(value, tuple) and any(_numeric(x) for x in value)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]


def _plain(value: Any) -> Any:
    return (
        {str(k): list(v) if isinstance(v, tuple) else v for k, v in value.items()}
        if isinstance(value, Mapping)
        else value
    )
