"""A profiler's own trace as a `Timeline`: what PyTorch's profiler (Kineto) writes, a file a process.

Where it has kernels of a GPU, they are the intervals, a stream of the GPU each a stream; else the outermost operators
of every thread, and what gloo's threads say that they do. Collectives are told by their names, whoever runs them; they
have streams of their own (`comm`), and kinds bear the names that ops have here, so that a prediction can lie beside.
Time begins with the first interval. A file names its rank; the devices of the timeline are ranks.

Source: Trace Event Format (Google); `torch.profiler.profile.export_chrome_trace`.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardplan.core import validation
from shardplan.core.decoding import decode_json, read_bytes
from shardplan.errors import ParseError, line
from shardplan.simulation.interval import Interval
from shardplan.simulation.timeline import Timeline

_MOST_RATIO, _SMALL = 200, 2**24  # of bytes to those of gzip, beside so many; text is a few dozen times as long
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
OPERATORS = ("cpu_op",)
COLLECTIVES = re.compile(r"^(gloo|nccl|mpi|ucc):|^nccl(Dev)?Kernel", re.IGNORECASE)
# The name of an op by what the names of kernels and operators have in them; the first that is found counts.
KINDS: tuple[tuple[str, str], ...] = (
    (r"all_?reduce", "all_reduce"),
    (r"reduce_?scatter", "reduce_scatter"),
    (r"all_?gather", "all_gather"),
    (r"all_?to_?all", "all_to_all"),
    (r"broadcast", "broadcast"),
    (r"send|recv", "message"),
    (r"memcpy|memset|aten::copy_|aten::to$", "copy"),
    (r"attention|flash|fmha", "attention"),
    (r"layer_?norm|rms_?norm", "layer_norm"),
    (r"gemm|cutlass|xmma|cublas|aten::(add|b)?mm|matmul|linear|einsum|baddbmm", "einsum"),
    (r"embedding|index_select|gather", "gather"),
    (r"scatter|index_(add|put)", "scatter_add"),
    (r"adam", "adamw"),
    (r"softmax", "softmax"),
    (r"reduce|aten::(sum|mean|amax|max)", "reduce_dims"),
    (r"elementwise|aten::(add|mul|sub|div|gelu|relu|silu|tanh|exp|neg|clamp)", "elementwise"),
)
_KINDS = tuple((re.compile(pattern, re.IGNORECASE), kind) for pattern, kind in KINDS)


def read_kineto(paths: str | Path | Iterable[str | Path], step: int | None = None) -> Timeline:
    """Return the timeline of a profiled run: the trace files of one process, or of several.

    Args:
        paths: Files that `export_chrome_trace` wrote (JSON, also gzip), one a rank.
        step: Of a run whose profiler was told of its steps, which of them; by default all that was recorded.

    Returns:
        A measured timeline, whose devices are ranks.

    Raises `ParseError`, naming the file and what is wrong.
    """
    files = [paths] if isinstance(paths, (str, Path)) else list(paths)
    found: list[tuple[int, str, float, float, str, str]] = []
    if step is not None:
        validation.whole_number("read_kineto: step", step, kind=ParseError)
    for number, path in enumerate(files):
        raw = read_bytes(path, f"the trace file {line(path)}")
        try:
            found += _of(_read(raw), number, step)
        except (ParseError, LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
            reason = f"missing {error}" if isinstance(error, KeyError) else error
            raise ParseError(f"{line(path)} is no trace of a profiler: {line(reason)}") from None
    origin = min((start for _, _, start, *_ in found), default=0.0)
    found.sort(key=lambda each: (each[2], each[3]))
    return Timeline(
        tuple(
            Interval(rank, stream, (start - origin) * 1e-6, (end - origin) * 1e-6, name, kind)
            for rank, stream, start, end, name, kind in found
        ),
        source="measured",
        title=", ".join(Path(path).name for path in files[:3]) + (", ..." if len(files) > 3 else ""),
    )


def kind_of(name: str) -> str:
    """Return the name of an op for that of a kernel or operator; `other` where it is none that is known.

    >>> kind_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL"), kind_of("aten::addmm"), kind_of("sort")
    ('all_reduce', 'einsum', 'other')
    """
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), "other")


def _read(raw: bytes) -> Mapping[str, Any]:
    whole: Any = decode_json(_decompressed(raw) if raw[:2] == b"\x1f\x8b" else raw)
    if not isinstance(whole, dict) or not isinstance(whole.get("traceEvents"), list):
        raise ValueError("it has no traceEvents")
    return whole


def _decompressed(raw: bytes) -> bytes:
    """What gzip holds."""
    most = _SMALL + _MOST_RATIO * len(raw)
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            data = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ParseError(f"it is no whole gzip: {error}") from None
    if len(data) > most:
        raise ParseError(f"its {len(raw)} bytes of gzip hold more than {most}; legal is up to {_MOST_RATIO} for one")
    return data


def _of(whole: Mapping[str, Any], number: int, step: int | None) -> list[tuple[int, str, float, float, str, str]]:
    """The intervals of a file: rank, stream, start and end in microseconds, name and kind."""
    rank = int(whole.get("distributedInfo", {}).get("rank", number))
    events = [e for e in whole["traceEvents"] if e.get("ph") == "X" and isinstance(e.get("dur"), (int, float))]
    low, high = _window(events, step)
    events = [e for e in events if low <= e["ts"] < high]
    kernels = [e for e in events if e.get("cat") in KERNELS]
    own = kernels or [e for e in events if e.get("cat") in OPERATORS or COLLECTIVES.match(str(e["name"])) is not None]
    if any(COLLECTIVES.match(str(e["name"])) for e in own):  # what calls them only issues them
        own = [e for e in own if not str(e["name"]).startswith("c10d::")]
    out: list[tuple[int, str, float, float, str, str]] = []
    reached: dict[tuple[Any, Any], float] = {}
    names: dict[tuple[Any, Any], str] = {}
    for e in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
        row = e["pid"], e["tid"]
        start, end = float(e["ts"]), float(e["ts"]) + float(e["dur"])
        # An operator inside another is a part of it; what only touches is cut where the one before it ends.
        if end <= reached.get(row, start - 1.0):
            continue
        start = max(start, reached.get(row, start))
        reached[row] = end
        talks = COLLECTIVES.match(str(e["name"])) is not None
        if row not in names:
            names[row] = (
                f"{'comm' if talks else 'compute'} {sum(n.startswith('comm') == talks for n in names.values())}"
            )
        out.append((rank, names[row], start, end, str(e["name"]), kind_of(str(e["name"]))))
    return out


def _window(events: Iterable[Mapping[str, Any]], step: int | None) -> tuple[float, float]:
    """When a step begins and ends, by the profiler's own marks."""
    if step is None:
        return float("-inf"), float("inf")
    marks = {str(e["name"]): e for e in events if str(e["name"]).startswith("ProfilerStep#")}
    mark = marks.get(f"ProfilerStep#{step}")
    if mark is None:
        legal = ", ".join(name.partition("#")[2] for name in marks) or "none: the profiler was not told of steps"
        raise ValueError(f"it has no step {step}; it has {legal}")
    return float(mark["ts"]), float(mark["ts"]) + float(mark["dur"])
