"""What it costs ranks to agree on a program: operations on the store of torch.distributed, and time.

`python -m benchmarks.store_operations [--out FILE]` runs the real agreement for 4, 16, 64 and 256 ranks, each a thread
with a connection of its own to one TCP store on this machine, and beside it the plain way: every rank writes its
digest, waits for all and reads all. Operations are the most that a rank asked for: at the first run of a program, at
the first run of the next, and at a later run. Seconds are the median over the repetitions, for all ranks.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from benchmarks.common import arguments, record, table, use_tests, write

COUNTS = (4, 16, 64, 256)
DIGESTS = tuple(f"{k:064x}" for k in range(1, 64))


def main() -> None:
    parser = arguments("store_operations", "Agreement of ranks: operations on the store.", 5, of="repetitions")
    options = parser.parse_args()
    rows = [_measured(n, options.count) for n in COUNTS]
    heads = list(rows[0])
    print(table(tuple(heads), [[r[h] for h in heads] for r in rows], "operations on the store, the most of any rank"))
    write(options.out, record({"count": options.count, "ranks": list(COUNTS)}, {"rows": rows}))


def _measured(n: int, repetitions: int) -> dict[str, Any]:
    """Operations and seconds of n ranks that agree, ours and plainly: threads of one process."""
    import torch.distributed as dist

    from shardplan.execution.torch.faults import TorchWatch
    from shardplan.execution.torch.group_state import GroupState

    counting: Any = use_tests("execution.stores").Counting
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # pyright: ignore
    stores = [counting(dist.TCPStore("127.0.0.1", server.port, None, False)) for _ in range(n)]  # pyright: ignore
    sites, ranks = [GroupState(None, store) for store in stores], tuple(range(n))

    def ours(rank: int, digest: str) -> None:
        TorchWatch(ranks, rank, digest[-8:], digest, [], 300.0, sites[rank]).begin("")

    def plain(rank: int, digest: str) -> None:
        keys = [f"plain/{digest}/{r}" for r in ranks]
        stores[rank].set(keys[rank], digest)
        stores[rank].wait(keys, timedelta(seconds=300))
        assert all(stores[rank].get(key).decode() == digest for key in keys)

    def most(act: Callable[[int, str], None], digest: str) -> tuple[int, float]:
        for store in stores:
            store.calls.clear()
        threads = [threading.Thread(target=act, args=(rank, digest)) for rank in ranks]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(store.calls.total() for store in stores), time.perf_counter() - started

    first, next_first, later = (most(ours, digest)[0] for digest in (DIGESTS[0], DIGESTS[1], DIGESTS[0]))
    seconds = statistics.median(most(ours, digest)[1] for digest in DIGESTS[2 : 2 + repetitions])
    reads = most(plain, DIGESTS[0])[0]
    plain_seconds = statistics.median(most(plain, digest)[1] for digest in DIGESTS[2 : 2 + repetitions])
    for site in sites:
        site.end()
    return {
        "ranks": n,
        "first run": first,
        "first run of the next program": next_first,
        "later runs": later,
        "seconds": seconds,
        "all read all": reads,
        "all read all, seconds": plain_seconds,
    }


if __name__ == "__main__":
    main()
