"""From a model's config.json to a launch: planned, explained, checked, and run here at degree 2.

    python examples/plan_model.py [FOLDER]

Plans an 8-billion-parameter Llama on 4 nodes of 8, writes what launches it into FOLDER (build/plan-8b), with a report,
and says why it moves what it moves. Then the plan runs scaled down: on the reference, and on 2 gloo processes for each
of its kinds of parallelism, where the loss and all gradients are those of the whole model.
"""

import os
import sys
from pathlib import Path

from shardplan.cli import run_command
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.launches.handover.scaled_plan import DEGREES

CONFIG = Path(__file__).with_name("llama-8b")


def run(*words: str) -> None:
    """Run a command of shardplan, as a shell would, and end where it fails."""
    print(f"\n$ shardplan {' '.join(words)}\n", flush=True)
    if status := run_command(words):
        sys.exit(status)


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "build/plan-8b")
    out.parent.mkdir(parents=True, exist_ok=True)
    run(
        "plan",
        os.path.relpath(CONFIG),
        "--on",
        "dgx-h100",
        "--nodes",
        "4",
        "--batch",
        "16",
        "--seq",
        "8192",
        "--out",
        str(out),
    )
    run("why", str(out), "--top", "2")
    run("check", str(out))
    strategy = HandedPlan.load(out).strategy
    processes = 2 ** sum(getattr(strategy, name) > 1 for name in DEGREES)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = [*launcher, "-m", "shardplan", "run", str(out), "--trace", str(out / "measured.json")]
    print(f"\n$ python {' '.join(words)}\n", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()
