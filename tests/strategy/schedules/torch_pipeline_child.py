"""Run on every rank: schedules from files in torch's own runtime; rank 0 prints the largest differences of gradients.

Arguments: files in the format `compute_comms`. The gradients are compared with those of the stages run one after the
other on the whole batch.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from shardplan.strategy.schedules import Schedule

WIDTH = 3


def loss(found, target):
    return torch.nn.functional.mse_loss(found, target)


def modules(count):
    torch.manual_seed(7)
    return [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double() for _ in range(count)]


def difference(path):
    found = Schedule.from_csv(path)
    rank, m = dist.get_rank(), found.microbatches
    whole, mine = modules(found.stages), modules(found.stages)
    x, target = torch.rand(2, 2 * m, WIDTH, dtype=torch.float64)
    stages = [
        PipelineStage(mine[s], s, found.stages, torch.device("cpu"))
        for s in range(found.stages)
        if found.owners[s] == rank
    ]
    runtime = _PipelineScheduleRuntime(stages, m, loss_fn=loss)
    runtime._load_csv(path, format="compute_comms")
    arguments = [x] if found.owners[0] == rank else []
    if found.owners[-1] == rank:
        runtime.step(*arguments, target=target)
    else:
        runtime.step(*arguments)
    loss(torch.nn.Sequential(*whole)(x), target).backward()
    own = [stage.stage_index for stage in stages]
    pairs = [pair for s in own for pair in zip(mine[s].parameters(), whole[s].parameters(), strict=True)]
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)


def main():
    dist.init_process_group("gloo")
    worst = []
    for name in sys.argv[1:]:
        found = torch.tensor(difference(name), dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        worst.append(float(found))
    if dist.get_rank() == 0:
        print(json.dumps(worst))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
