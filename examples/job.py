"""A training step under a strategy, on real processes or in this one, and the same step on one device: equal results.

    torchrun --standalone --nproc-per-node 4 examples/job.py
    python examples/job.py

The second runs all four devices in one process, on the numpy reference.
"""

import os
import sys

import numpy as np

import shardplan as sp


def on_processes(job: sp.Job, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the step on the processes of torchrun, one device each."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = sp.run(job, given, backend="torch")
    dist.destroy_process_group()
    return found


def main() -> None:
    model = sp.Model.load("mlp", layers=2, hidden=4, dtype="f64", optimizer="sgd")
    job = sp.partition(model, sp.Strategy(pipeline=2, tensor=2, microbatch=2, global_batch=4))
    rng = np.random.default_rng(0)
    whole = model.resize(batch=4).program
    given = {name: rng.random(t.shape) for name, t in whole.inputs}
    found = on_processes(job, given) if "RANK" in os.environ else sp.run(job, given)
    one = sp.run(whole, [[given[name]] for name, _ in whole.inputs])
    wanted = {name.removeprefix("next."): value for name, [value] in zip(whole.outputs, one, strict=True)}
    for name, value in wanted.items():
        assert np.allclose(found[name], value, rtol=1e-12), name
    if os.environ.get("RANK", "0") == "0":
        print(job, "equals the whole model in", *wanted, file=sys.stderr)


if __name__ == "__main__":
    main()
