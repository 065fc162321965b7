"""The lab: programs on real processes over an emulated cluster of real, rate-limited links.

    with Lab(Cluster.of("2x4", (200, 1000))) as lab:
        for m in lab.measure([program, Task(program, placement)]):
            print(m.title, m.seconds, m.cv, m.kernel_edge_bytes)
        events.simulate(program, lab.cluster.topology, constants=CONSTANTS).seconds  # of `simulation`

Reading order:

- `cluster`  a topology as namespaces, bridges and shaped links; `needs` what the machine must allow; `network` builds
             and reads it
- `session`  `Lab`: keeps the ranks alive and measures; `record` what comes out, `item` what travels
- `host`     the first process inside the namespaces, `rank` the processes it forks
- `ring`     the engine of rings and chains, `gloo` the one of gloo's own collectives, `replay` bytes without values,
             `wire` which counts
- `hlo`      the collectives of XLA's compiled text, as a script to replay
- `experiments` what a sweep measures, with its predictions; `sweep` measures it, `results` is what it finds, `scores`
             and `validate` hold the predictions to it
"""

from shardplan.execution.lab.cluster import CONSTANTS as CONSTANTS
from shardplan.execution.lab.cluster import Cluster as Cluster
from shardplan.execution.lab.measurement import Measurement as Measurement
from shardplan.execution.lab.measurement import Repetition as Repetition
from shardplan.execution.lab.needs import Unavailable as Unavailable
from shardplan.execution.lab.needs import missing as missing
from shardplan.execution.lab.session import ENGINES as ENGINES
from shardplan.execution.lab.session import Lab as Lab
from shardplan.execution.lab.session import Task as Task
from shardplan.execution.lab.session import measure as measure
