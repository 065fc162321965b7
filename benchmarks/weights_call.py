"""What a call of a prepared refit costs in Python: a message, a region; and what making the handle costs a region.

`python -m benchmarks.weights_call [--count 50]` launches two processes on gloo: a trainer with a Llama of tiny sizes
and 3,000 layers as Hugging Face stores it in f32, and a server as vLLM stores it in bf16, so that bytes are nothing and
what is left is the way through Python. `few` has room for all in a few messages, `many` for some regions a message.
Times are processor seconds of the calling thread, medians of calls. A region is copied once on each side, by one call
of torch over all of a message (`_foreach_copy_`), whose time is in that of the region.

- `us a region`: a call of `few`, over its regions;
- `call over asked`: a call of `many`, over 3 us a region and 100 us a message;
- `making over asked`: seconds of making regions, messages and views of the handle (`RefitExchange`), over 50 ms and
  4 us a region.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import ROOT, arguments, record, table, write
from benchmarks.processes import be_rank, launch, of_all_ranks

CONFIG: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3000, "vocab_size": 16, "tie_word_embeddings": False,
}  # fmt: skip
LIMITS = {"few": None, "many": 20_000}
ASKED = {"us a region": 3.0, "call over asked": 1.0, "making over asked": 1.0}


def median(work: Callable[[], object], count: int) -> float:
    """The median of the calling thread's processor seconds of some runs."""
    taken: list[float] = []
    for _ in range(count):
        begun = time.thread_time()
        work()
        taken.append(time.thread_time() - begun)
    return statistics.median(taken)


def child(count: int) -> dict[str, Any]:
    """Call both handles on this rank; what both ranks saw."""
    import torch
    import torch.distributed as dist

    import shardplan as sp
    from shardplan.interop.torch import Refit
    from shardplan.interop.torch.refit.exchange import RefitExchange

    rank = dist.get_rank()
    a = sp.Weights.load("hf-llama", CONFIG, dtype="f32")
    b = sp.Weights.load("vllm-llama", CONFIG, devices=[1], dtype="bf16")
    kind = torch.float32 if rank == 0 else torch.bfloat16
    model = {name: torch.zeros(shape, dtype=kind) for name, shape, _ in (b if rank else a).parameters(rank)}
    seen: dict[str, Any] = {}
    for name, limit in LIMITS.items():
        plan = sp.refit(a, b, memory_limit=limit)
        regions = len(plan.regions(rank))  # worked out, and remembered by nobody
        with Refit(plan, model, name=name) as sync:
            sync()
            seconds = median(sync, count)
            exchange = sync._exchange  # pyright: ignore[reportPrivateUsage]
            messages = sum(len(s) + len(r) for s, r in exchange.rounds)
            again = (plan, rank, exchange.source, exchange.target, torch.device("cpu"))
            made = median(lambda again=again: RefitExchange(*again), 5)
        seen[name] = {"regions": regions, "messages": messages, "seconds": seconds, "made": made}
    return {"ranks": of_all_ranks(seen)}


def main() -> None:
    options = arguments("weights_call", __doc__.splitlines()[0] if __doc__ else "", 50, of="calls").parse_args()
    found, _ = launch(ROOT / "benchmarks" / "weights_call.py", 2, options.count)
    rows: list[dict[str, Any]] = []
    for side, seen in zip(("trainer", "server"), found["ranks"], strict=True):
        few, many = seen["few"], seen["many"]
        rows.append(
            {
                "side": side,
                "regions": few["regions"],
                "messages": [few["messages"], many["messages"]],
                "us a region": 1e6 * few["seconds"] / few["regions"],
                "call over asked": many["seconds"] / (3e-6 * many["regions"] + 1e-4 * many["messages"]),
                "making seconds": few["made"],
                "making over asked": few["made"] / (0.05 + 4e-6 * few["regions"]),
            }
        )
    shown = list(rows[0])
    print(table(shown, [[str(r[k]) if k == "messages" else r[k] for k in shown] for r in rows], "a call's Python"))
    met = {k: max(r[k] for r in rows) <= most for k, most in ASKED.items()}
    print(met)
    write(options.out, record({"count": options.count} | CONFIG, {"asked": ASKED, "met": met, "rows": rows}))


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_rank(lambda: child(int(sys.argv[1])))
    else:
        main()
