"""Readers of files from elsewhere, on mutated files: an answer or one line, within bounds of memory and time.

`python -m benchmarks.reader_faults [--count 5000] [--seed 37] [--reader plan ...]`: of every reader `--count` files,
made of its seeds by one mutation each (`reader_mutations`): a value of its format replaced by a wrong one, doubled,
nested deep or left out, a length that lies, bytes flipped, cut out, doubled or put in, a file cut short, empty or a
folder, words and lines of a text replaced. A mutant stands in the place of its seed, so that folders are read with one
wrong file in them. They are read in forked children (Linux), at most `BATCH` in one, each within `MOST_SECONDS` of
processor time and `MOST_BYTES` more of address space than the child begins with.

Outcomes: `answer`; `line`, an error of `shardplan.errors` on one line, below which may stand, indented, what it points
into or lists; `raw`, any other exception; `long` and `big`, a bound is passed; `died`, a signal ended the child. The
readers are those of `reader_seeds` and `reader_seeds_weights`. Beside the counts a result keeps `before`, those of the
first run, of 300 files each, before anything was mended, and `runs`, what was run and mended since.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import Progress, arguments, record, table, write
from benchmarks.reader_mutations import FOLDER, Mutant, Reader, mutations
from benchmarks.reader_seeds import SEEDED
from benchmarks.reader_seeds_weights import WEIGHTS_SEEDED

from shardplan.errors import ShardplanError

BATCH = 250  # reads in a child
MOST_SECONDS = 10  # of processor time for one read
MOST_WAIT = 120  # seconds on the clock, for a read that sleeps
MOST_BYTES = 2 * 2**30
READERS: dict[str, Reader] = SEEDED | WEIGHTS_SEEDED
OUTCOMES = ("answer", "line", "raw", "long", "big", "died")
EXAMPLES = 10  # that a result keeps of what is neither an answer nor a line


class Found(NamedTuple):
    """What came of a read."""

    outcome: str
    message: str = ""


# Reads, in a child each within bounds


def outcome(read: Callable[[Path], object], path: Path) -> Found:
    """Read a file and say what came of it."""
    try:
        read(path)
    except MemoryError as error:
        return Found("big", str(error))
    except ShardplanError as error:
        lines = str(error).split("\n")
        one = all(line.startswith("  ") for line in lines[1:])  # indented: what the line points into, or lists
        return Found("line" if one else "raw", str(error))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Found("raw", f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")
    return Found("answer")


def put(path: Path, data: bytes) -> None:
    """Let a file, or a folder, be all that stands at a path."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    elif data == FOLDER:
        path.unlink()
    if data == FOLDER:
        path.mkdir()
    else:
        path.write_bytes(data)


def child(read: Callable[[Path], object], mutants: Sequence[Mutant], paths: Sequence[Path], answers: int) -> None:
    """Read the mutants one after another, and write what came of each; the kernel ends what takes too long."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for mutant in mutants:
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + MOST_SECONDS + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        path = paths[mutant.seed]
        whole = path.read_bytes()
        put(path, mutant.data)
        data = pickle.dumps(tuple(outcome(read, path)))
        put(path, whole)
        os.write(answers, len(data).to_bytes(4, "big") + data)


def batch(read: Callable[[Path], object], mutants: Sequence[Mutant], paths: Sequence[Path]) -> list[Found]:
    """Read mutants, each in the place of its seed, in one child; the last found may be its end."""
    whole = [path.read_bytes() for path in paths]
    sys.stdout.flush()
    mine, its = os.pipe()
    process = os.fork()
    if not process:
        os.close(mine)
        try:
            child(read, mutants, paths, its)
        finally:
            os._exit(0)
    os.close(its)
    found: list[Found] = []
    with os.fdopen(mine, "rb") as pipe:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(process, signal.SIGKILL))
        while True:
            signal.alarm(MOST_WAIT)
            head = pipe.read(4)
            if len(head) < 4:
                break
            found.append(Found(*pickle.loads(pipe.read(int.from_bytes(head, "big")))))
        signal.alarm(0)
    status = os.waitpid(process, 0)[1]
    if len(found) < len(mutants):
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        slow = ended in (signal.SIGXCPU, signal.SIGKILL)
        found.append(Found("long" if slow else "died", f"ended by signal {ended}"))
    for path, data in zip(paths, whole, strict=True):  # as the child left them where it ended within a read
        put(path, data)
    return found


def tried(reader: Reader, count: int, seed: int, name: str) -> dict[str, Any]:
    """Return the counts of a reader's outcomes, and examples of those that should not be."""
    rng, progress = random.Random(f"{name} {seed}"), Progress(name, count)
    counts, examples = Counter[str](), list[dict[str, Any]]()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        paths = list(reader.seeds(Path(folder)))
        for path in paths:  # what is loaded once is loaded before the fork, and every seed is answered
            reader.read(path)
        seeds = [path.read_bytes() for path in paths]
        left = list(mutations(rng, seeds, count, reader.text, reader.structure))
        while left:
            found = batch(reader.read, left[:BATCH], paths)
            for mutant, one in zip(left, found, strict=False):
                counts[one.outcome] += 1
                if one.outcome not in ("answer", "line") and len(examples) < EXAMPLES:
                    examples.append({"seed": mutant.seed, "what": mutant.what, **one._asdict()})
            left = left[len(found) :]
            progress.add(len(found))
    return {"reader": name, "seeds": len(seeds), "files": sum(counts.values())} | {
        "counts": {outcome: counts[outcome] for outcome in OUTCOMES},
        "seconds": time.monotonic() - start,
        "examples": examples,
    }


def main() -> None:
    """Mutate, read, count, and write the result; readers that are not tried keep their rows."""
    parser = arguments("reader_faults", __doc__ or "", 5000, of="mutated files a reader")
    parser.add_argument("--seed", type=int, default=37)
    parser.add_argument("--reader", nargs="*", default=list(READERS), choices=list(READERS))
    options = parser.parse_args()
    rows = [tried(READERS[name], options.count, options.seed, name) for name in options.reader]
    print(table(("reader", "files", *OUTCOMES), [(r["reader"], r["files"], *r["counts"].values()) for r in rows]))
    for row in rows:
        for example in row["examples"]:
            print(row["reader"], example)
    more: dict[str, Any] = {}
    if options.out.exists():
        kept = json.loads(options.out.read_text(encoding="utf-8"))
        rows = sorted(
            [*(r for r in kept["readers"] if r["reader"] not in options.reader), *rows], key=itemgetter("reader")
        )
        more = {key: kept[key] for key in ("before", "runs") if key in kept}
    bounds = {"seconds": MOST_SECONDS, "bytes": MOST_BYTES}
    about = record({"count": options.count, "seed": options.seed, "bounds": bounds}, {"readers": rows} | more)
    write(options.out, about)


if __name__ == "__main__":
    main()
