"""A session in the middle of a transfer that takes minutes, for a test that kills it; prints a line once it moves."""

import threading
import time

import shardplan as sp
from shardplan.core.ops import AllReduce
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.execution.lab import Cluster, Lab


def main() -> None:
    t = sp.TensorType.parse("i32[4096, 256]{+x}", sp.Mesh(x=4))
    program = Program({"0": t}, [Step(AllReduce(("x",)), ("0",), ("1",))], ("1",))
    with Lab(Cluster.of("2x2", (1, 1))) as lab:
        threading.Thread(target=lambda: lab.measure([program], 1), daemon=True).start()
        time.sleep(1.0)
        print("moving", flush=True)
        time.sleep(120)


if __name__ == "__main__":
    main()
