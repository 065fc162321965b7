"""The lab: programs on real processes over an emulated cluster of real, rate-limited links.

    with Lab(Cluster.of("2x4", (200, 1000))) as lab:
        for m in lab.measure([program, Task(program, placement)]):
            print(m.title, m.seconds, m.cv, m.kernel_edge_bytes)
        replayed(script_of(program), lab.cluster.topology, constants=CONSTANTS).seconds  # of `simulation`

Reading order:

- `cluster`     a topology as namespaces, some of which forward, and shaped links, and the commands that build them
- `needs`       what the machine must allow
- `network`     the links inside the lab's namespaces: built, entered, and read
- `session`     `Lab`: keeps the ranks alive, and measures
- `item`        what travels between session, host and ranks, jobs as bytes
- `measurement` what comes out
- `host`        the first process inside the namespaces, which forks the ranks
- `rank`        one of those: runs its part by the torch backend's interpreter when it is told to
- `steps`       steps of jobs, whose compute is slept and whose messages are real
- `experiments` what a sweep measures, with its predictions
- `sweep`       measures it
- `results`     what it found, and the file of that
- `scores`      how well a model orders and times what was measured
- `validate`    the models against result files, and the targets they are held to
"""

from shardplan.execution.lab.cluster import CONSTANTS as CONSTANTS
from shardplan.execution.lab.cluster import Cluster as Cluster
from shardplan.execution.lab.measurement import Measurement as Measurement
from shardplan.execution.lab.measurement import Repetition as Repetition
from shardplan.execution.lab.needs import Unavailable as Unavailable
from shardplan.execution.lab.needs import missing as missing
from shardplan.execution.lab.session import Lab as Lab
from shardplan.execution.lab.session import Task as Task
from shardplan.execution.lab.session import measure as measure
from shardplan.simulation.scripts import ENGINES as ENGINES
