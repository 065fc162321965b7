"""Sequences of collectives in which one rank runs another program once: who is told, and when.

`python -m benchmarks.unlike_sequences [--count 10000] [--seed 0] [--together 16]` runs random sequences of three to
six programs, new and known ones, on two to five ranks that are threads of this process, with the watch, the wire and
the posts that real ranks have, and a stand-in for the library whose calls meet whatever they carry. A sequence is
wrong where a rank has not raised by its next call that takes data of another, or where its error does not name the
rank that differed. Waits that are said to last half a second last a fifth of it; so many sequences run at a time.
"""

from __future__ import annotations

import sys

from benchmarks.common import arguments, record, use_tests, write

BLOCK = 400


def main() -> None:
    parser = arguments("unlike_sequences", "Sequences in which one rank differs.", 10_000, of="sequences")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=16)
    options = parser.parse_args()
    unlike = use_tests("execution.unlike_runs")
    wrong: list[str] = []
    seconds, done = 0.0, 0
    with unlike.hasty():
        while done < options.count:
            found, took = unlike.wrong_sequences(
                min(BLOCK, options.count - done), options.seed + done, options.together
            )
            wrong, seconds, done = wrong + found, seconds + took, done + min(BLOCK, options.count - done)
            print(f"{done} sequences, {len(wrong)} ranks wrong, {seconds:.0f} s", file=sys.stderr, flush=True)
            result = {"sequences": done, "wrong": len(wrong), "first wrong": wrong[:5], "seconds": round(seconds)}
            write(options.out, record({"count": done, "seed": options.seed, "together": options.together}, result))
    print(f"{done} sequences: {len(wrong)} ranks not told by their next call, or not of whom")


if __name__ == "__main__":
    main()
